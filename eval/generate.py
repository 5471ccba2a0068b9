"""Greedy generation for lists of examples, on any causal transformers model, dense or hybrid.

The plain way is `model.generate` without sampling, until the example's `Stop`. Everything else is a
speed-up that can be switched off and in float32 changes no score:

- stop when the text contains all answers, because the score cannot change after that;
- append the expected answer to the prompt as a draft, and decode from its first wrong token on;
- prefill a beginning that prompts share (shots, a context, a haystack) only once;
- decode several sequences at once, on GPUs as a CUDA graph (decoding.py).

All but the first change the order of floating-point sums. An example where a token leads by less
than rounding can explain (`MARGINS`) is generated again in the plain way. In half precision most
texts have such a token, so nothing is checked there: what the speed-ups give is as good as the
plain way's text, but not always the same one (`batch=1` is the plain way).
"""
# T tokens, N rows of logits, V vocabulary

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, takewhile
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedTokenizerBase

from bosch.attention.cache import CACHE, allocated_bytes
from bosch.eval.decoding import GraphSteps, RollingSteps, Steps, takes_slots
from bosch.eval.metrics import string_match_all
from bosch.eval.prompt_cache import (
    can_copy,
    copy_cache,
    join_caches,
    keep_everything,
    keep_windows_only,
    new_cache,
)
from bosch.eval.settings import FAST, PLAIN, SHORTER_OR_STRETCHED, GenerationSettings
from bosch.eval.suites._interface import Example, Stop
from bosch.run.errors import UserError

Key = tuple[str, int, int]  # task, length, index: identifies an example

# Lead of the likeliest token over the second, in logits, that rounding cannot reverse. In float32
# leads changed by at most 3e-6 times the largest logit (measured: 8 and 28 layers, 2k tokens).
MARGINS = {torch.float64: 1e-6, torch.float32: 5e-4}
BATCH = 16  # sequences decoded at once, unless the settings say how many
MIN_GRAPH_STEPS = 16  # to the longest answer's end: fewer are decoded without a CUDA graph
MIN_SHARED = 1 / 8  # of a prompt: copying a shorter beginning saves next to nothing
CPU_POOL_BYTES = 2**31  # caches waiting for a batch


@dataclass
class Job:
    key: Key
    example: Example
    prompt: list[int]
    draft: list[int]  # tokens of the expected answer
    tokens: list[int] = field(default_factory=list)  # generated; the last is not in the cache yet
    text: str = ""
    ended: str | None = None  # by: end token, stop string, answered, length
    is_plain: bool = True  # computed in the plain way so far
    is_certain: bool = True  # no token so far was too close to call
    cache: Cache | None = None

    @property
    def is_open(self) -> bool:
        return self.ended is None and self.is_certain

    @property
    def num_positions(self) -> int:
        """Tokens in the cache: all but the last one generated."""
        return len(self.prompt) + len(self.tokens) - 1


class Generator:
    """Generates with a model. Examples that need more than `max_positions` raise UserError."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        settings: GenerationSettings = FAST,
        max_positions: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.max_positions = model, tokenizer, max_positions
        self.margin = MARGINS.get(model.dtype, 0.0)  # 0: nothing is checked
        is_exact_alone = settings.batch == 1 and self.margin == 0
        if is_exact_alone or not can_copy(new_cache(model.config)):
            settings = in_plain_way(settings)
        self.settings = settings
        self.batch = settings.batch or BATCH
        # Not in the plain way, whose sums have another order.
        on_gpu = model.device.type == "cuda"
        self.uses_graphs = on_gpu and self.batch > 1 and takes_slots(model)
        self.end_ids = end_tokens(model.generation_config.eos_token_id, tokenizer)
        self.num_redone = 0  # examples generated again in the plain way
        # The last prompt and its cache, if the next prompt begins like it.
        self._trunk: tuple[list[int], Cache] | None = None

    @property
    def dtype(self) -> str:
        """The model's number format, as `float32`."""
        return str(self.model.dtype).removeprefix("torch.")

    def generate(self, examples: Iterable[tuple[Key, Example]]) -> Iterator[Job]:
        """Yield each example's job as it gets done. Examples whose prompts share a beginning
        should be neighbors."""
        pool: list[Job] = []
        jobs = (self._encode(key, example) for key, example in examples)
        for job, following in pairwise(chain(jobs, [None])):
            assert job is not None
            self._read(job, following)
            if not job.is_open:
                yield self._finish(job)
            else:
                if pool and self._is_too_much([*pool, job]):
                    yield from self._answer(pool)
                    pool = []
                pool.append(job)
            if following is None or len(pool) >= self.batch:
                yield from self._answer(pool)
                pool = []

    def _answer(self, pool: list[Job]) -> Iterator[Job]:
        self._decode(pool)
        yield from map(self._finish, pool)

    def _encode(self, key: Key, example: Example) -> Job:
        prompt, name = self.tokenizer(example.prompt)["input_ids"], f"{key[0]}, example {key[2]}"
        most, new = self.max_positions, example.max_new_tokens
        # The last token of an answer is never fed to the model.
        if most is not None and len(prompt) + new - 1 > most:
            problem = f"{name}: {len(prompt):,} and {new} new tokens exceed the {most:,} positions"
            raise UserError(f"{problem}. {SHORTER_OR_STRETCHED}")
        if not prompt:
            raise UserError(f"{name}: the prompt is empty; a model needs at least one token.")
        draft: list[int] = []
        if self.settings.draft_answers and example.answers:
            blank = "" if example.prompt[-1:].isspace() else " "
            text = blank + example.answers[0]
            draft = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Job(key, example, prompt, draft[: new - 1])

    @torch.inference_mode()
    def _read(self, job: Job, following: Job | None) -> None:
        """Prefill the prompt together with the answer's draft."""
        keep, num_read = self._is_shared(job.prompt, following), 0
        if self._trunk is not None:
            prompt, trunk = self._trunk
            # At least the last token is read again: its logits choose the first new one.
            num_read = min(common_length(prompt, job.prompt), len(job.prompt) - 1)
            cache = copy_cache(trunk, num_read, whole=keep)
        else:
            cache = new_cache(self.model.config)
            if keep:
                keep_everything(cache)
        job.is_plain = num_read == 0 and not job.draft
        tokens, num_logits = job.prompt + job.draft, 1 + len(job.draft)
        chunk = self.settings.prefill_chunk
        # Chunks bound the memory that a long prompt takes. What is left is read at once, with the
        # logits of the last prompt token and of each draft token: those predict the draft and the
        # token after it.
        while num_read + chunk <= len(tokens) - num_logits:
            self._forward(cache, tokens[num_read : num_read + chunk], 1)
            num_read += chunk
        if job.draft:
            keep_everything(cache)  # so that a wrong draft can be removed from a hybrid's cache
        logits_NV = self._forward(cache, tokens[num_read:], num_logits)
        # The cache is kept for the next prompt, with this prompt's own draft behind the shared
        # beginning: copies are cut where the prompts part.
        self._trunk = (job.prompt, cache) if keep else None
        self._accept_draft(job, logits_NV)
        if job.is_open:
            # The trunk must stay as it is, and a cache that holds wrong draft tokens must lose
            # them.
            can_keep = self._trunk is None and cache.get_seq_length() == job.num_positions
            if can_keep:
                keep_windows_only(cache)
            job.cache = cache if can_keep else copy_cache(cache, job.num_positions)

    def _is_shared(self, prompt: Sequence[int], following: Job | None) -> bool:
        """Whether the next prompt begins like this one for long enough to copy the cache."""
        if following is None or not self.settings.share_prefixes:
            return False
        return common_length(prompt, following.prompt) >= MIN_SHARED * len(following.prompt)

    def _accept_draft(self, job: Job, logits_NV: Tensor) -> None:
        """Append the draft's tokens as far as the model agrees, and one token of the model's."""
        _, found = likeliest(logits_NV)
        for row in zip(logits_NV, *found, strict=True):
            if not job.is_open or job.tokens != job.draft[: len(job.tokens)]:
                break
            self._accept(job, *row)

    def _forward(self, cache: Cache, tokens: Sequence[int], num_logits: int) -> Tensor:
        """Run all tokens through the model; logits of the last ones."""
        ids = torch.tensor([tokens], device=self.model.device)
        # Without this the model computes logits for the whole prompt. Some models cannot do less.
        keep = {"logits_to_keep": num_logits} if self.model._supports_logits_to_keep() else {}
        logits_BTV: Tensor = self.model(ids, use_cache=True, **{CACHE: cache}, **keep).logits
        return logits_BTV[0, -num_logits:]

    @torch.inference_mode()
    def _decode(self, jobs: list[Job]) -> None:
        """Decode the waiting jobs, padded on the left, to their ends, one token each per step."""
        if not jobs:
            return
        is_alone, device = len(jobs) == 1, self.model.device
        cache = join_caches([job.cache for job in jobs if job.cache is not None])
        steps = self._steps(jobs, cache)
        is_plain = is_alone and isinstance(steps, RollingSteps)
        for job in jobs:
            job.cache, job.is_plain = None, job.is_plain and is_plain
        ids_N = torch.tensor([job.tokens[-1] for job in jobs], device=device)
        while jobs:
            logits_NV = steps(ids_N)
            ids_N, found = likeliest(logits_NV)  # of which the next step takes the device's
            for job, logits_V, token, lead in zip(jobs, logits_NV, *found, strict=True):
                if job.is_open:
                    self._accept(job, logits_V, token, lead)
            chosen = [
                job.tokens[-1] if job.is_open else token
                for job, token in zip(jobs, found[0], strict=True)
            ]
            if chosen != found[0]:  # an end token was not allowed yet
                ids_N = torch.tensor(chosen, device=device)
            still_open = [i for i, job in enumerate(jobs) if job.is_open]
            if len(still_open) <= len(jobs) / 2:  # not sooner: dropping some copies the others
                jobs = [jobs[i] for i in still_open]
                if jobs:
                    steps.keep(still_open)
                    ids_N = ids_N[still_open]

    def _steps(self, jobs: Sequence[Job], cache: Cache) -> Steps:
        lengths = [job.num_positions for job in jobs]
        num_steps = max(job.example.max_new_tokens - len(job.tokens) for job in jobs)
        # A graph is captured anew for each batch, which takes as long as a few steps.
        if self.uses_graphs and num_steps >= MIN_GRAPH_STEPS:
            return GraphSteps(self.model, cache, lengths, num_steps)
        return RollingSteps(self.model, cache, lengths)

    def _finish(self, job: Job) -> Job:
        """The job's result. An uncertain one is generated again in the plain way."""
        if job.is_certain:
            return job
        self.num_redone += 1
        # Alone, without draft or shared beginning: every sum is in the order of the plain way.
        plain = Generator(self.model, self.tokenizer, in_plain_way(self.settings))
        return next(plain.generate([(job.key, job.example)]))

    def _accept(self, job: Job, logits_V: Tensor, token: int, lead: float) -> None:
        """Append the likeliest token, and check whether the text ends with it."""
        stop, end_ids = job.example.stop, self._ends(job.example.stop)
        if len(job.tokens) < stop.min_new_tokens and token in end_ids:
            ends = torch.tensor(sorted(end_ids), device=logits_V.device)
            _, ((token,), (lead,)) = likeliest(logits_V.index_fill(0, ends, -torch.inf)[None])
        if not job.is_plain and lead < self.margin:
            job.is_certain = False
        else:
            self._append(job, token)

    def _ends(self, stop: Stop) -> set[int]:
        if not stop.newline_token:
            return self.end_ids
        newline: int = self.tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
        return self.end_ids | {newline}

    def _append(self, job: Job, token: int) -> None:
        example, stop = job.example, job.example.stop
        can_answer = self.settings.stop_when_answered and stop.when_answered
        job.tokens.append(token)
        job.text = str(self.tokenizer.decode(job.tokens, skip_special_tokens=True))
        if token in self._ends(stop):
            job.ended = "end token"
        elif any(text in job.text for text in stop.strings):
            job.ended = "stop string"
        elif can_answer and string_match_all(job.text, example.answers) == 1:
            job.ended = "answered"
        elif len(job.tokens) == example.max_new_tokens:
            job.ended = "length"

    def _is_too_much(self, pool: Sequence[Job]) -> bool:
        """For one batch: joined, every cache takes as much as the longest."""
        max_bytes, device = CPU_POOL_BYTES, self.model.device
        if device.type == "cuda":  # half of what is free beside the caches to be joined
            max_bytes = torch.cuda.mem_get_info(device)[0] // 2
        each = [allocated_bytes(job.cache) for job in pool if job.cache is not None]
        return len(each) * max(each, default=0) > max_bytes


def in_plain_way(settings: GenerationSettings) -> GenerationSettings:
    """PLAIN, but with the stopping rule and the prefill chunk of `settings`."""
    stop, chunk = settings.stop_when_answered, settings.prefill_chunk
    return replace(PLAIN, stop_when_answered=stop, prefill_chunk=chunk)


def likeliest(logits_NV: Tensor) -> tuple[Tensor, tuple[list[int], list[float]]]:
    """The likeliest token of each row, on the device; and on the host, with its lead over the
    second."""
    ids_N, best_N2 = logits_NV.argmax(-1), logits_NV.float().topk(2).values
    best_N, second_N = best_N2.unbind(1)
    # One transfer: with each the host waits until the device has done all its work. float32 has
    # every id up to 16 million.
    ids, best, lead = torch.stack([ids_N.float(), best_N, best_N - second_N]).tolist()
    if not all(map(isfinite, best)):
        raise UserError("The model's logits are not finite: damaged weights, or a low --precision.")
    return ids_N, ([int(token) for token in ids], lead)


def end_tokens(ends: int | list[int] | None, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The end tokens in the model's generation settings, else the tokenizer's."""
    if ends is None:
        ends = tokenizer.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends} - {None}


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
