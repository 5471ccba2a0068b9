"""Greedy generation for lists of examples, on any causal model of transformers, dense or hybrid.

The plain way is `model.generate` without sampling, until the example's `Stop` says so. Everything
else is speed, has a switch, and changes no score:

- stop once all answers stand in the text, where the score cannot change any more;
- read the answer as a draft behind the prompt, and decode on from where the model leaves it;
- compute only keys and values in the top layer where nothing but them is needed of a position;
- read a beginning that two prompts share (shots, a context, a haystack) once;
- decode several sequences at once.

All but the first add up sums in another order. An example with a token that leads by less than
rounding can explain (`MARGINS`) is done once more in the plain way.
"""
# T tokens, N rows of logits, V vocabulary

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from bosch.eval.metrics.string_match import string_match_all
from bosch.eval.prompt_cache import can_copy, copy_cache, join_caches, keep_everything, new_cache
from bosch.eval.settings import FAST, PLAIN, GenerationSettings
from bosch.eval.suites._interface import Example
from bosch.eval.top_layer import last_rows_only
from bosch.hybrid.cache import kv_bytes
from bosch.run.errors import UserError

Key = tuple[str, int, int]  # task, length, index: what an example is known by

# By how much the likeliest token must lead the next, in logits, to be beyond rounding. In float32
# leads were seen to change by 3e-6 times the largest logit at most (8 and 28 layers, 2k tokens).
MARGINS = {torch.float64: 1e-6, torch.float32: 5e-4, torch.float16: 0.1, torch.bfloat16: 0.5}
LEAST_SHARED = 1 / 8  # of a prompt: copying a shorter beginning saves next to nothing
CPU_POOL_BYTES = 2**31  # caches that wait for a batch


@dataclass(frozen=True)
class Generation:
    key: Key  # as it came with the example
    text: str
    tokens: tuple[int, ...]
    ended: str  # by: end token, stop string, answered, length


@dataclass
class Job:
    """One example on its way."""

    key: Key
    example: Example
    prompt: list[int]
    draft: list[int]  # what a right answer begins with
    tokens: list[int] = field(default_factory=list)  # generated; the last was not read yet
    text: str = ""
    ended: str | None = None
    is_plain: bool = True  # so far computed as the plain way does
    is_certain: bool = True  # no token was too close to call
    cache: Cache | None = None

    @property
    def is_open(self) -> bool:
        return self.ended is None and self.is_certain


class Generator:
    """A model that generates. `max_positions`: an example that needs more is an error, not cut."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: GenerationSettings = FAST,
        max_positions: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.max_positions = model, tokenizer, max_positions
        check_takes_cache(model)
        if not can_copy(new_cache(model.config)):
            settings = in_plain_way(settings)
        self.settings = settings
        self.is_exact = model.dtype in (torch.float32, torch.float64)
        self.batch = settings.batch or (16 if self.is_exact else 1)
        self.margin = MARGINS[model.dtype]
        self.batch_margin = self.margin if self.is_exact or settings.batch is None else 0.0
        self.end_ids = end_tokens(model, tokenizer)
        self.num_redone = 0  # examples with a token that was too close to call
        self._trunk: tuple[list[int], Cache] | None = None  # the last prompt, if the next shares it

    def generate(self, examples: Iterable[tuple[Key, Example]]) -> Iterator[Generation]:
        """Each example's generation, in the order in which they get done. Examples that share a
        beginning should come one after the other."""
        pool: list[Job] = []
        jobs = (self._encode(key, example) for key, example in examples)
        for job, following in pairwise(chain(jobs, [None])):
            assert job is not None
            self._read(job, following)
            if job.is_open:
                pool.append(job)
            else:
                yield self._finish(job)
            if len(pool) >= self.batch or self._is_full(pool):
                self._decode(pool)
                yield from map(self._finish, pool)
                pool = []
        self._decode(pool)
        yield from map(self._finish, pool)

    def _encode(self, key: Key, example: Example) -> Job:
        prompt = self.tokenizer(example.prompt)["input_ids"]
        # The last token of an answer is never read.
        needed = len(prompt) + example.max_new_tokens - 1
        if self.max_positions is not None and needed > self.max_positions:
            raise UserError(
                f"{key}: the prompt's {len(prompt):,} tokens and {example.max_new_tokens} new ones "
                f"do not fit the model's {self.max_positions:,} positions, and nothing is cut off. "
                "Ask for a smaller length, or stretch the positions with --yarn."
            )
        if not prompt:
            raise UserError(f"{key}: the prompt is empty; a model needs a token to go on from.")
        draft: list[int] = []
        if self.settings.draft_answers and example.answers:
            blank = "" if example.prompt[-1:].isspace() else " "
            text = blank + example.answers[0]
            draft = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Job(key, example, prompt, draft[: example.max_new_tokens - 1])

    # ------------------------------------------------------------------------------ the prompt

    @torch.inference_mode()
    def _read(self, job: Job, following: Job | None) -> None:
        """The prompt and the answer's draft, in one pass. In half precision, where the plain way is
        left as seldom as can be, one after the other, and only if the first token agrees."""
        is_shared = self._is_shared(job.prompt, following)
        cache, num_read = self._begin(job, keep=is_shared)
        draft = job.draft if self.is_exact else []
        job.is_plain = num_read == 0 and not draft and not self._skips_rows
        logits_NV = self._prefill(cache, job.prompt + draft, num_read, 1 + len(draft))
        self._trunk = (job.prompt, cache) if is_shared else None
        self._accept_along(job, logits_NV)
        if not self.is_exact and job.is_open and job.draft[:1] == job.tokens:
            self._try_draft(job, cache)
        if not self.is_exact and not job.is_plain and not job.ended:
            job.is_certain = False  # too seldom beyond rounding to be worth a try
        if job.is_open:
            is_own = self._trunk is None and cache.get_seq_length() == num_positions(job)
            job.cache = cache if is_own else copy_cache(cache, num_positions(job))

    @property
    def _skips_rows(self) -> bool:
        return self.settings.short_top_layer and self.is_exact

    def _is_shared(self, prompt: Sequence[int], following: Job | None) -> bool:
        """Whether the next prompt begins like this one, and copying that is worth it."""
        settings = self.settings
        if following is None or not settings.share_prefixes:
            return False
        may_end_with_draft = settings.stop_when_answered and settings.draft_answers
        if not (self.is_exact or (may_end_with_draft and following.example.stop.when_answered)):
            return False
        return common_length(prompt, following.prompt) >= LEAST_SHARED * len(following.prompt)

    def _begin(self, job: Job, keep: bool) -> tuple[Cache, int]:
        """A cache to read the prompt into, and how many of its tokens are in there already."""
        if self._trunk is not None:
            prompt, trunk = self._trunk
            num_shared = min(common_length(prompt, job.prompt), len(job.prompt) - 1)
            return copy_cache(trunk, num_shared, whole=keep), num_shared
        cache = new_cache(self.model.config)
        if keep:
            keep_everything(cache)
        return cache, 0

    def _prefill(
        self, cache: Cache, tokens: Sequence[int], num_read: int, num_logits: int
    ) -> Tensor:
        """The logits of the last tokens, once the cache has read those from `num_read` on."""
        chunk, first_needed = self.settings.prefill_chunk, len(tokens) - num_logits
        while num_read + chunk <= first_needed:
            self._forward(cache, tokens[num_read : num_read + chunk], 1)
            num_read += chunk
        if num_logits > 1:
            keep_everything(cache)  # a draft read in vain must leave a hybrid's cache again
        return self._forward(cache, tokens[num_read:], num_logits)

    def _try_draft(self, job: Job, cache: Cache) -> None:
        """Half precision: take over all of the draft, to the end of the answer, or nothing."""
        first, was_plain = list(job.tokens), job.is_plain
        job.is_plain = False
        keep_everything(cache)
        self._accept_along(job, self._forward(cache, job.draft, len(job.draft)))
        if not job.ended:
            job.tokens, job.text = first, self._decode_text(first)
            job.is_plain, job.is_certain = was_plain, True

    def _accept_along(self, job: Job, logits_NV: Tensor) -> None:
        """Append tokens as long as they are the draft's, which was read, and one more."""
        ids, leads = likeliest(logits_NV)
        for row in range(len(ids)):
            if not job.is_open or job.tokens != job.draft[: len(job.tokens)]:
                break
            at = slice(row, row + 1)
            self._accept(job, logits_NV[at], ids[at], leads[at], self.margin)

    def _forward(self, cache: Cache, tokens: Sequence[int], num_logits: int) -> Tensor:
        """The logits of the last tokens, once the cache has read them all."""
        ids = torch.tensor([tokens], device=self.model.device)
        rows = num_logits if self._skips_rows else None
        # Without this a model computes the logits of the whole prompt; some know no other way.
        keep = {"logits_to_keep": num_logits} if self.model._supports_logits_to_keep() else {}
        with last_rows_only(self.model, rows):
            output = self.model(ids, past_key_values=cache, use_cache=True, **keep)
        logits_TV: Tensor = output.logits[0, -num_logits:]
        return logits_TV

    # ------------------------------------------------------------------------------ the answer

    @torch.inference_mode()
    def _decode(self, jobs: list[Job]) -> None:
        """The rest of what waits, side by side, a token each at a time."""
        if not jobs:
            return
        is_alone, device = len(jobs) == 1, self.model.device
        cache: Any = join_caches([job.cache for job in jobs if job.cache is not None])
        lengths_N1 = torch.tensor([[num_positions(job)] for job in jobs], device=device)
        longest = int(lengths_N1.max())
        # Padding is in front.
        mask_NT = (torch.arange(longest, device=device) >= longest - lengths_N1).long()
        for job in jobs:
            job.cache, job.is_plain = None, job.is_plain and is_alone
        while jobs:
            ids_N1 = torch.tensor([[job.tokens[-1]] for job in jobs], device=device)
            padding: dict[str, Any] = {}
            if not is_alone:
                mask_NT = torch.nn.functional.pad(mask_NT, (0, 1), value=1)
                positions_N1 = mask_NT.sum(1, keepdim=True) - 1
                padding = {"attention_mask": mask_NT, "position_ids": positions_N1}
            output = self.model(ids_N1, past_key_values=cache, use_cache=True, **padding)
            logits_NV = output.logits[:, -1]
            ids, leads = likeliest(logits_NV)
            for row, job in enumerate(jobs):
                if job.is_open:
                    at = slice(row, row + 1)
                    self._accept(job, logits_NV[at], ids[at], leads[at], self.batch_margin)
            rows = [row for row, job in enumerate(jobs) if job.is_open]
            if len(rows) <= len(jobs) / 2:  # not sooner: dropping some copies the others
                jobs = [jobs[row] for row in rows]
                if jobs:
                    kept = torch.tensor(rows, device=device)
                    cache.batch_select_indices(kept)
                    mask_NT = mask_NT[kept]

    def _finish(self, job: Job) -> Generation:
        """What is uncertain is done once more in the plain way, which knows no uncertainty."""
        if job.is_certain:
            assert job.ended is not None
            return Generation(job.key, job.text, tuple(job.tokens), job.ended)
        self.num_redone += 1
        plain = Generator(self.model, self.tokenizer, in_plain_way(self.settings))
        return next(plain.generate([(job.key, job.example)]))

    def _accept(
        self, job: Job, logits_NV: Tensor, ids: list[int], leads: list[float], margin: float
    ) -> None:
        """Append the likeliest token, and see whether that is the end."""
        stop, end_ids = job.example.stop, self.end_ids
        if stop.newline_token:
            newline = self.tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
            end_ids = end_ids | {newline}
        if len(job.tokens) < stop.min_new_tokens and ids[0] in end_ids:
            ends = torch.tensor(sorted(end_ids), device=logits_NV.device)
            ids, leads = likeliest(logits_NV.index_fill(1, ends, -torch.inf))
        if not job.is_plain and leads[0] < margin:
            job.is_certain = False
            return
        job.tokens.append(ids[0])
        job.text = self._decode_text(job.tokens)
        if ids[0] in end_ids:
            job.ended = "end token"
        elif any(text in job.text for text in stop.strings):
            job.ended = "stop string"
        elif (
            self.settings.stop_when_answered
            and stop.when_answered
            and string_match_all(job.text, job.example.answers) == 1
        ):
            job.ended = "answered"
        elif len(job.tokens) == job.example.max_new_tokens:
            job.ended = "length"

    def _decode_text(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _is_full(self, pool: Sequence[Job]) -> bool:
        room = CPU_POOL_BYTES
        if self.model.device.type == "cuda":
            room = torch.cuda.mem_get_info(self.model.device)[0] // 2  # joined they need as much
        return sum(kv_bytes(job.cache) for job in pool if job.cache is not None) > room


def num_positions(job: Job) -> int:
    """Tokens in the cache: all but the last one generated."""
    return len(job.prompt) + len(job.tokens) - 1


def in_plain_way(settings: GenerationSettings) -> GenerationSettings:
    """PLAIN, with what ends a text and how a prompt is read as in `settings`."""
    stop, chunk = settings.stop_when_answered, settings.prefill_chunk
    return replace(PLAIN, stop_when_answered=stop, prefill_chunk=chunk)


def likeliest(logits_NV: Tensor) -> tuple[list[int], list[float]]:
    """The likeliest token of each row, and by how much it leads the next."""
    best_N2 = logits_NV.float().topk(2).values
    return logits_NV.argmax(-1).tolist(), (best_N2[:, 0] - best_N2[:, 1]).tolist()


def check_takes_cache(model: Any) -> None:
    """Models that are recurrent throughout keep their past under other names."""
    others = {"cache_params", "state"} & set(inspect.signature(model.forward).parameters)
    if others and "past_key_values" not in inspect.signature(model.forward).parameters:
        raise UserError(
            f"{type(model).__name__} keeps no keys and values (its past is `{others.pop()}`); only "
            "models with attention layers can be evaluated."
        )


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """What ends a text: as the model's generation settings say, else the tokenizer."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends} - {None}


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common before they part."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
