"""The calibration's answers as the dense model itself writes them.

An example counts when every token of its answer is the arg-max. A model that answers ": 123" where
" 123" is expected would be wrong, though every benchmark finds the number, and a search for masks
that answer " 123" moves away from it. So each answer becomes what the dense model writes, greedily,
up to the end of the expected values. Where it does not write them, the expected answer stays. A
question of data/text_tasks.py is left out then; where such a task has no expected answer, what the
model writes is the answer.
"""

import re
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from transformers import Cache, PreTrainedTokenizerBase

from bosch.attention.cache import CACHE
from bosch.data.calibration import LEAD, OWN_TOKENS, ContextText, Rewording, encode_after
from bosch.data.needle_text import MOST_LETTERS
from bosch.eval.generate import end_tokens
from bosch.eval.prompt_cache import can_copy, copy_cache, new_cache
from bosch.run.progress import say, track

MOST_TOKENS = 128  # longer answers, continuations of a text, are not asked for
PREFILL_TOKENS = 8_192  # at once


def rewording(load_model: Callable[[], Any], tokenizer: PreTrainedTokenizerBase) -> Rewording:
    """What data/calibration.py's build_set takes. The model is loaded when it is needed."""

    def reword(contexts: list[ContextText]) -> list[ContextText]:
        model = load_model()
        with track("calibration", len(contexts), "contexts") as bar:
            found = []
            for context in contexts:
                found.append(in_own_words(context, model, tokenizer))
                bar.advance()
        asked = sum(len(context.pieces) for context, _ in found)
        count = sum(number for _, number in found)
        say(f"calibration: the dense model answers {count} of {asked} questions, in its own words")
        return [context for context, _ in found]

    return reword


@torch.inference_mode()
def in_own_words(
    context: ContextText, model: Any, tokenizer: PreTrainedTokenizerBase
) -> tuple[ContextText, int]:
    """The context with these answers, each after those before it, and how many there are."""
    ids, pieces, left_out = list[int](), [], list[int]()
    answered, ends = 0, end_tokens(model.generation_config.eos_token_id, tokenizer)
    cache = new_cache(model.config)
    if context.own_answers:
        return freely_answered(context, model, tokenizer)
    for number, ((prompt, answer), values) in enumerate(
        zip(context.pieces, context.answers, strict=True)
    ):
        ids += encode_after(ids, prompt, tokenizer) if ids else tokenizer(prompt)["input_ids"]
        expected = encode_after(ids, answer, tokenizer)
        if len(expected) <= MOST_TOKENS:
            # What is written goes into a copy, since the answer as it is encoded may have other
            # tokens. Where no copy can be made, each question reads the whole text anew.
            if not can_copy(cache):
                cache = new_cache(model.config)
            first = read(model, cache, ids[cache.get_seq_length() :])
            copy = copy_cache(cache, len(ids)) if can_copy(cache) else cache
            most = len(expected) + LEAD
            written = write(model, copy, tokenizer, ids[-8:], first, most, values, ends)
            # Of several lines or entries, the one that is asked for comes first.
            if context.sources and written and any(map(str.isalnum, written[: -len(values[0])])):
                written = None
            if context.sources and not written:
                left_out.append(number)
            answer, answered = written or answer, answered + bool(written)
        # The next question follows the answer that counts, in the same tokens as a search reads
        # them.
        ids += encode_after(ids, answer, tokenizer)
        pieces.append((prompt, answer))
    return replace(context, pieces=tuple(pieces), left_out=tuple(left_out)), answered


def freely_answered(context: ContextText, model: Any, tokenizer: Any) -> tuple[ContextText, int]:
    """The context with what the model writes, in so many parts, each an answer of its own: a mask
    that changes the last words still has the first ones right."""
    ((prompt, _),) = context.pieces
    ids, cache = list(tokenizer(prompt)["input_ids"]), new_cache(model.config)
    token, written = read(model, cache, ids), list[int]()
    end_ids = end_tokens(model.generation_config.eos_token_id, tokenizer)
    for _ in range(OWN_TOKENS * context.own_answers):
        if token in end_ids:
            break
        written.append(token)
        token = read(model, cache, [token])
    before = list(ids[-8:])
    text = tokenizer.decode(before + written)[len(tokenizer.decode(before)) :]
    text = text.rstrip("\ufffd")  # a sign of which only some bytes are written
    # Whole words, each with the blanks before it. The last one may be cut.
    words = re.findall(r"\s*\S+", text)
    words = words[:-1] or words
    if len(words) < context.own_answers and len(text) > MOST_LETTERS * len(words):
        # Chinese and others put no blanks between words. Cut between tokens, since those of half a
        # token are others than the model's own.
        known = len(tokenizer.decode(before))
        so_far = [tokenizer.decode(before + written[: n + 1]) for n in range(len(written))]
        ends = [len(each) - known for each in so_far if not each.endswith("\ufffd")]
        words = [part for begin, end in pairwise([0, *ends]) if (part := text[begin:end])]
    count = min(context.own_answers, len(words))
    cuts = [len(words) * number // max(1, count) for number in range(count + 1)]
    parts = ["".join(words[begin:end]) for begin, end in pairwise(cuts)]
    if not parts:
        return replace(context, left_out=(0,)), 0
    pieces = [(prompt, parts[0]), *(("", part) for part in parts[1:])]
    answers, sources = tuple((part.strip(),) for part in parts), ("",) * len(parts)
    found = replace(context, pieces=tuple(pieces), answers=answers, sources=sources)
    return found, len(parts)


def read(model: Any, cache: Cache, tokens: Sequence[int]) -> int:
    """The likeliest token after these and those in the cache."""
    for begin in range(0, len(tokens), PREFILL_TOKENS):
        part = torch.tensor([tokens[begin : begin + PREFILL_TOKENS]], device=model.device)
        logits = model(part, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits
    return int(logits[0, -1].argmax())


def write(
    model: Any,
    cache: Cache,
    tokenizer: Any,
    before: Sequence[int],
    token: int,
    most: int,
    values: Sequence[str],
    end_ids: Set[int],
) -> str | None:
    """What follows these tokens, up to the end of the last value; None if so many lack one, or if
    the model ends its text before."""
    known, tokens = len(tokenizer.decode(before)), list(before)
    for _ in range(most + 1):  # one more, which shows that the last value is whole
        tokens.append(token)
        text = tokenizer.decode(tokens)[known:]
        ends = [end_of(value, text) for value in values]
        if all(ends):
            return text[: max(ends)]
        if token in end_ids:
            return None
        token = read(model, cache, [token])
    return None


def end_of(value: str, text: str) -> int:
    """Where the value ends in the text. 0 if it is not there, or if nothing shows that it is whole:
    100 is no answer in 1005. The name of an end token, such as </s>, shows it too."""
    ends = (found.end() for found in re.finditer(re.escape(value), text))
    return next(
        (end for end in ends if end < len(text) and not goes_on(*text[end - 1 : end + 1])), 0
    )


def goes_on(last: str, following: str) -> bool:
    """Whether a number or a word does. Letters without capitals are not judged, since Chinese and
    others put no blanks between words."""
    return all(sign.isdigit() or sign.lower() != sign.upper() for sign in (last, following))
