"""Needle-in-a-haystack examples, built exactly as RULER builds them. The calibration set, the NIAH
suite and the training of the tiny model all use this builder.

With the same seed, tokenizer, essays and key words the bytes are RULER's, as long as the random
draws keep their order. The toy world uses the same code with `TOY_SIZES`.
"""

import random
import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from bosch.data.tokenizer_files import fast_backend
from bosch.run.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = TypeVar("P", bound="Prompt")

DEFAULT_SEED = 42
SHORT_LENGTH = 4_096  # below it RULER's sizes are smaller
DEPTHS_PERCENT = tuple(round(i * 100 / 39) for i in range(40))  # 40 from 0 to 100, ends included

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {type} for {key} is: {value}."
TASK_TEXT = (
    "Some special magic {type} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type} afterwards.\n{context}\n"
)
QUESTION = "What are all the special magic {type} for {query} mentioned in the provided text?"
ANSWER_PREFIX = " The special magic {type} for {query} mentioned in the provided text are"
# In this order: "are" is a part of "are all".
SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))
NEEDLE_PATTERN = re.compile(
    r"One of the special magic (?:numbers|uuids) for (?P<key>.+?) is: (?P<value>[0-9a-f-]+)\."
)
# What a tokenizer must be able to spell: the words of a needle, every digit and every hex digit.
SPELLED = NEEDLE.format(type="numbers or uuids", key="some-key", value="0123456789-abcdef")


class DoesNotFitError(UserError):
    """A task needs more tokens than the length has."""


def does_not_fit(task: str, length: int, reason: str) -> DoesNotFitError:
    advice = "Use a greater length, or leave this task out."
    return DoesNotFitError(f"{task} cannot be built in {length} tokens: {reason}. {advice}")


@dataclass(frozen=True)
class NeedleTask:
    name: str
    haystack: Literal["noise", "essay", "needle"]
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_queries: int = 1  # keys that the question asks for
    num_values: int = 1  # values of each key; all of them are answers

    def __post_init__(self) -> None:
        if self.haystack == "essay" and self.num_needles > len(DEPTHS_PERCENT):
            raise UserError(
                f"Task {self.name} hides {self.num_needles} needles in an essay, which has "
                f"{len(DEPTHS_PERCENT)} depths for them. Use fewer questions a context."
            )

    @property
    def num_needles(self) -> int:
        return self.num_keys * self.num_values


TASKS: dict[str, NeedleTask] = {
    task.name: task
    for task in (
        NeedleTask("niah_single_1", "noise"),
        NeedleTask("niah_single_2", "essay"),
        NeedleTask("niah_single_3", "essay", values="uuids"),
        NeedleTask("niah_multikey_1", "essay", num_keys=4),
        NeedleTask("niah_multikey_2", "needle"),
        NeedleTask("niah_multikey_3", "needle", keys="uuids", values="uuids"),
        NeedleTask("niah_multivalue", "essay", num_values=4),
        NeedleTask("niah_multiquery", "essay", num_keys=4, num_queries=4),
    )
}
PAPER_TASKS = tuple(TASKS)[:6]


class EssaySource(Protocol):
    """A long text; an essay haystack is a prefix of it."""

    def sentences(self, num_words: int) -> list[str]: ...  # of the first `num_words` words


@dataclass(frozen=True)
class Sizes:
    """The step of a haystack's size, and the room reserved for the answer. Defaults: RULER's."""

    essay_step_words: int = 500
    line_step: int = 25
    short_line_step: int = 5  # below SHORT_LENGTH
    answer_tokens: int = 128
    # Upper bound of the size search, as a multiple of what the tokens of the smallest haystack
    # suggest. A small one is mostly template and suggests too little; None: a unit per token.
    search_factor: int | None = 3

    def step(self, task: NeedleTask, length: int) -> int:
        """The smallest haystack, and the step by which a larger one shrinks, in words or lines."""
        if task.haystack == "essay":
            return self.essay_step_words
        return self.short_line_step if length < SHORT_LENGTH else self.line_step


TOY_SIZES = Sizes(20, line_step=1, short_line_step=1, answer_tokens=40, search_factor=None)


@dataclass(frozen=True)
class Material:
    essays: EssaySource | None  # None: the task's haystack is not essays
    words: Sequence[str]  # keys are drawn from them
    sizes: Sizes = Sizes()
    facts: dict[str, str] = field(default_factory=dict)  # names and hashes of essays and words
    # Whether another line of the haystack may have the key that is asked for, as in RULER, whose
    # words are three hundred times as many as ours.
    keys_may_repeat: bool = True


@dataclass(frozen=True)
class Needle:
    key: str
    value: str
    sentence: str
    start: int  # character of the example's input at which the sentence starts
    asked: bool  # whether the question asks for its key


@dataclass(frozen=True)
class Prompt:
    """A text and what answers it."""

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int = 0  # tokens of the prompt plus the answer budget; 0: not measured

    @property
    def prompt(self) -> str:
        return self.input + self.answer_prefix

    def to_row(self, index: int) -> dict[str, object]:
        """A line of the JSONL file, with RULER's names."""
        return {
            "index": index,
            "input": self.input,
            "answer_prefix": self.answer_prefix,
            "outputs": list(self.outputs),
            "length": self.length,
        }


@dataclass(frozen=True)
class NeedleExample(Prompt):
    keys: tuple[str, ...] = ()  # of the hidden needles, in the order of their draw
    queries: tuple[str, ...] = ()  # the keys asked for

    @property
    def needles(self) -> tuple[Needle, ...]:
        """The hidden needles in the order of the text; not the lines of a needle haystack."""
        return tuple(
            Needle(key, match["value"], match[0], match.start(), key in self.queries)
            for match in NEEDLE_PATTERN.finditer(self.input)
            if (key := match["key"]) in self.keys
        )

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(key, value) of every hidden needle, those asked for first."""
        needles = sorted(self.needles, key=lambda needle: not needle.asked)
        return tuple((needle.key, needle.value) for needle in needles)


def build_examples(
    task: NeedleTask,
    length: int,
    num_samples: int,
    seed: int,
    tokenizer: "PreTrainedTokenizerBase",
    material: Material,
) -> list[NeedleExample]:
    """The first `num_samples` examples of at most `length` tokens, including the answer budget. All
    come from one random generator, so asking for more gives the same ones first."""
    count_tokens, sizes = token_counter(tokenizer), material.sizes
    rng = random.Random(seed)

    def draw(num_units: int) -> NeedleExample:
        example = write_example(task, num_units, rng, seed, material)
        return replace(example, length=count_tokens(example.prompt) + sizes.answer_tokens)

    step, budget = sizes.step(task, length), sizes.answer_tokens
    # Needles go between lines, at places that differ, so there must be as many. In an essay they
    # may follow each other.
    least = 1 if task.haystack == "essay" else task.num_needles
    best = find_size(draw, max(step, least), length, budget, factor=sizes.search_factor)
    tried = range(best, least - 1, -step)
    return [first_that_fits(task.name, length, draw, tried) for _ in range(num_samples)]


def find_size(
    draw: Callable[[int], Prompt],
    low: int,
    length: int,
    budget: int,
    room: int | None = None,
    factor: int | None = 3,
) -> int:
    """The largest size, from `low` on, of a prompt that takes at most `room` tokens, with `budget`
    for its answer. The search ends at `factor` times the size for `length` tokens that the smallest
    prompt suggests; None: at one a token."""
    # Every `draw` here takes numbers from the generator that all examples come from: RULER's bytes
    # depend on how often this search draws, and so on each of its bounds.
    tokens_per_unit = (draw(low).length - budget) / low
    high = int(length / tokens_per_unit * factor) if factor else length
    most = length if room is None else room
    return largest(lambda size: draw(size).length <= most, low, max(high, 2 * low))


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest size that fits, by bisection; `low` if none does. A little noisy where each try
    is a new draw."""
    # Not `bisect` over precomputed lengths: a try is a whole text to tokenize, and RULER's bytes
    # depend on which sizes are tried.
    best = low
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def first_that_fits(task: str, length: int, draw: Callable[[int], P], sizes: Sequence[int]) -> P:
    """A prompt, drawn until it fits: once of each size, and then again and again of the last."""
    for size in sizes[:-1]:
        if (drawn := draw(size)).length <= length:
            return drawn
    too_long: list[int] = []
    # Until further draws are pointless: none of fifty fits, and the shortest is too long by more
    # than three times what the lengths differ among each other. RULER tries forever.
    while len(too_long) < 50 or (
        min(too_long) - length <= 3 * (max(too_long) - min(too_long)) + 10 and len(too_long) < 2000
    ):
        if (drawn := draw(sizes[-1])).length <= length:
            return drawn
        too_long.append(drawn.length)
    raise does_not_fit(task, length, f"with its answer it needs {min(too_long)}")


def least_tokens(task: NeedleTask, length: int, material: Material) -> int:
    """Tokens that the smallest example takes at least, with its answer: one a word."""
    example = write_smallest(task, length, material)
    return len(example.prompt.split()) + material.sizes.answer_tokens


def write_smallest(task: NeedleTask, length: int, material: Material) -> NeedleExample:
    # Any seed will do: what is asked of it is about how long it is.
    num_units = max(material.sizes.step(task, length), task.num_needles)
    return write_example(task, num_units, random.Random(0), 0, material)


def write_example(
    task: NeedleTask,
    num_units: int,
    rng: random.Random,
    shuffle_seed: int,
    material: Material,
) -> NeedleExample:
    """One new example on `num_units` words of the essays, or lines. The draws from `rng` are in
    RULER's order, and as there the shuffle has its own generator: it permutes the needles of every
    sample in the same way."""

    def draw(kind: str) -> str:
        if kind == "numbers":
            return str(rng.randint(10**6, 10**7 - 1))
        if kind == "uuids":  # not uuid4(), which draws from the system and not from `rng`
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return rng.choice(material.words)

    def draw_key() -> str:
        key = draw(task.keys)
        while key in keys and not material.keys_may_repeat:
            key = draw(task.keys)
        return key

    keys: list[str] = []
    values: list[list[str]] = []
    needles: list[str] = []
    for _ in range(task.num_keys):
        key, its_values = draw_key(), [draw(task.values) for _ in range(task.num_values)]
        needles += [NEEDLE.format(type=task.values, key=key, value=value) for value in its_values]
        keys.append(key)
        values.append(its_values)
    random.Random(shuffle_seed).shuffle(needles)

    if task.haystack == "essay":
        if material.essays is None:
            raise UserError(f"{task.name} hides its needles in essays; name their file.")
        sentences = material.essays.sentences(num_units)
        depths = rng.sample(DEPTHS_PERCENT, len(needles))
        places = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
        # What lies before a needle, then the needle, and at the end what lies behind the last. With
        # no sentence between two needles there are two blanks, as in RULER.
        parts = []
        for needle, begin, end in zip(needles, [0, *places], places, strict=False):
            parts += [" ".join(sentences[begin:end]), needle]
        context = " ".join([*parts, " ".join(sentences[places[-1] :])])
    else:
        if task.haystack == "noise":
            lines = [NOISE] * num_units
        else:  # needles of other keys; a key is drawn before its value, as arguments are in order
            lines = [
                NEEDLE.format(type=task.values, key=draw_key(), value=draw(task.values))
                for _ in range(num_units)
            ]
        # From the end, so that a place still counts the lines of the haystack alone.
        places = sorted(rng.sample(range(num_units), len(needles)), reverse=True)
        for needle, place in zip(needles, places, strict=True):
            lines.insert(place, needle)
        context = "\n".join(lines)

    asked = rng.sample(range(task.num_keys), task.num_queries)
    queries = tuple(keys[i] for i in asked)
    outputs = tuple(value for i in asked for value in values[i])
    question = write_question(task, queries, outputs)
    text = fill(TASK_TEXT, task, context=context) + question.input
    return NeedleExample(text, question.answer_prefix, outputs, 0, tuple(keys), queries)


def write_question(task: NeedleTask, queries: Sequence[str], outputs: Sequence[str]) -> Prompt:
    query = queries[0] if len(queries) == 1 else ", ".join(queries[:-1]) + f", and {queries[-1]}"
    text, prefix = (fill(template, task, query=query) for template in (QUESTION, ANSWER_PREFIX))
    return Prompt(text, prefix, tuple(outputs))


def fill(template: str, task: NeedleTask, **parts: str) -> str:
    """The template with its parts filled in; for one answer in the singular, by RULER's edits."""
    type_name: str = task.values
    if task.num_queries * task.num_values == 1:
        for plural, singular in SINGULAR:
            template = template.replace(plural, singular)
        type_name = type_name[:-1]
    return template.format(type=type_name, **parts)


def ask_other_keys(task: NeedleTask, example: NeedleExample) -> list[Prompt]:
    """Further questions about the example's text, one for each hidden key it does not ask for. For
    q questions in all, build the example with `dataclasses.replace(task, num_keys=q)`."""
    return [
        write_question(task, [key], [value for other, value in example.pairs if other == key])
        for key in example.keys
        if key not in example.queries
    ]


def pairs_in(text: str) -> set[tuple[str, str]]:
    """(key, value) of every needle sentence in a text, including those of a `needle` haystack."""
    return {(match["key"], match["value"]) for match in NEEDLE_PATTERN.finditer(text)}


def token_counter(tokenizer: "PreTrainedTokenizerBase") -> Callable[[str], int]:
    """`len(tokenizer.tokenize(text))`, in about half the time. Refuses a tokenizer that leaves a
    letter or digit out, or has the unknown token for it."""
    backend = fast_backend(tokenizer)
    encoded = tokenizer(SPELLED, add_special_tokens=False, return_offsets_mapping=True)
    unknown = {tokenizer.unk_token_id}
    if name := getattr(backend.model, "unk_token", None):
        unknown.add(backend.token_to_id(name))  # it may be in tokenizer.json only
    covered = {i for start, end in encoded["offset_mapping"] for i in range(start, end)}
    lost = [i for i, sign in enumerate(SPELLED) if sign.isalnum() and i not in covered]
    if lost or not unknown.isdisjoint(encoded["input_ids"]):
        problem = f"This tokenizer cannot spell a needle, as it lacks characters of {SPELLED!r}"
        raise UserError(f"{problem}. Use one of English letters, digits and punctuation.")
    backend.no_truncation()  # like `tokenize`: a tokenizer's file may ask for either
    backend.no_padding()
    # The fast form leaves out the offsets, which take half of the time.
    return lambda text: len(backend.encode_batch_fast([text], add_special_tokens=False)[0])


def needle_distances(example: NeedleExample, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """For each needle asked for, the number of tokens from its start to the prompt's end. If at
    most W, a window of W sees the whole needle from the last token."""
    asked = (needle for needle in example.needles if needle.asked)
    starts = [needle.start for needle in asked if needle.value in example.outputs]
    return distances_to_end(example.prompt, starts, tokenizer)


def distances_to_end(
    text: str, starts: Sequence[int], tokenizer: "PreTrainedTokenizerBase"
) -> list[int]:
    """Tokens from each of these characters to the end of the text."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # Tokens that end at or before a character lie before it; all others are counted.
    ends = [end for _, end in encoded["offset_mapping"]]
    return [len(ends) - bisect_right(ends, start) for start in starts]
