"""The NIAH builder against a plain reimplementation of spec/eval.md 1.1 to 1.6, and handwritten
texts."""

import random
import re
import string
import uuid
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from bosch.data import needles
from bosch.data.essays import Essays, SentenceEnds
from bosch.data.key_words import KeyWords, wonderwords_keys
from bosch.data.needles import TASKS, Material, NeedleExample, build_examples, write_example
from bosch.run.errors import UserError
from tests.odd_tokenizers import train_bpe

WORDS = sorted(
    f"{a}-{n}" for a in ("old", "ad hoc", "shiny") for n in ("cat", "arm-rest", "TV", "dew")
)
TOPICS = ("the garden", "a compiler", "Lisp", "Rome", "the essay", "an old painter", "good taste")
DEEDS = ("was late", "had no end", "changed everything", "is hard to see", "came back in spring")


@pytest.fixture(scope="module")
def essay_words() -> list[str]:
    rng = random.Random(3)
    sentences = [f"{rng.choice(TOPICS)} {rng.choice(DEEDS)} {i}." for i in range(900)]
    return " ".join(sentences).split(" ")


@pytest.fixture(scope="module")
def essays(essay_words: list[str]) -> Essays:
    """Essays whose sentences end at full stops."""
    ends = [match.end() for match in re.finditer(r"\.", " ".join(essay_words))]
    return Essays(essay_words, SentenceEnds(ends, {}), "generated", "")


def cut_at_full_stops(text: str) -> list[str]:
    pieces = text.split(". ")
    return [*(piece + "." for piece in pieces[:-1]), pieces[-1]]


@pytest.fixture(scope="module")
def tokenizer(essay_words: list[str]) -> PreTrainedTokenizerFast:
    """A small byte-level BPE, with a start token that must not be counted."""
    prompts = [task_text(TASKS[name]) for name in needles.PAPER_TASKS]
    lines = [" ".join(essay_words), *WORDS, *prompts]
    return PreTrainedTokenizerFast(tokenizer_object=train_bpe(lines, 600, ["<s>"]), bos_token="<s>")


def task_text(task: needles.NeedleTask) -> str:
    example = write_example(
        replace(task, haystack="noise"), 5, random.Random(0), 0, Material(None, WORDS)
    )
    return example.prompt


@pytest.fixture(scope="module")
def build(tokenizer: PreTrainedTokenizerFast, essays: Essays) -> Any:
    def build(name: str, length: int, count: int, seed: int = 42, *sizes: Any) -> Any:
        material = Material(essays, WORDS, *sizes)
        return build_examples(TASKS[name], length, count, seed, tokenizer, material)

    return build


# The reimplementation: the steps of the specification. It shares no code with the builder.


FIELDS = ("index", "input", "answer_prefix", "outputs", "length")
# The table of spec/eval.md 1.1: haystack, keys, values, and the numbers k, q and v.
Specified = namedtuple("Specified", "haystack key value k q v")
SPECIFIED = {
    "niah_single_1": Specified("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": Specified("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": Specified("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": Specified("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": Specified("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": Specified("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": Specified("essay", "words", "numbers", 1, 1, 4),
    "niah_multiquery": Specified("essay", "words", "numbers", 1, 4, 1),
}


def slow_rows(
    task: Specified, max_seq_length: int, num_samples: int, seed: int, tokenize: Any, essay: Any
) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    k = max(task.k, task.q)
    needle_form = "One of the special magic {type} for {key} is: {value}."
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    noise += "There and back again."

    def random_thing(kind: str) -> str:
        if kind == "numbers":
            return str(rng.randint(10**6, 10**7 - 1))
        if kind == "words":
            return rng.choice(WORDS)
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    def generate(num_haystack: int) -> tuple[str, list[str]]:
        keys, values, needles = list[str](), list[list[str]](), list[str]()
        for _ in range(k):
            keys.append(random_thing(task.key))
            values.append([random_thing(task.value) for _ in range(task.v)])
            for value in values[-1]:
                needles.append(needle_form.format(type=task.value, key=keys[-1], value=value))
        random.Random(seed).shuffle(needles)

        if task.haystack == "essay":
            words = essay
            while len(words) < num_haystack:
                words = words + essay
            sentences = cut_at_full_stops(" ".join(words[:num_haystack]).strip())
            depths = rng.sample([round(i * 100 / 39) for i in range(40)], len(needles))
            positions = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
            parts, before = [], 0
            for needle, position in zip(needles, positions, strict=True):
                parts += [" ".join(sentences[before:position]), needle]
                before = position
            context = " ".join([*parts, " ".join(sentences[before:])])
        else:
            lines = []
            for _ in range(num_haystack):
                if task.haystack == "noise":
                    lines.append(noise)
                else:
                    key, value = random_thing(task.key), random_thing(task.value)
                    lines.append(needle_form.format(type=task.value, key=key, value=value))
            indexes = sorted(rng.sample(range(num_haystack), len(needles)), reverse=True)
            for needle, index in zip(needles, indexes, strict=True):
                lines.insert(index, needle)
            context = "\n".join(lines)

        asked = rng.sample(range(k), task.q)
        answers = [value for i in asked for value in values[i]]
        query = keys[asked[0]]
        if len(asked) > 1:
            query = ", ".join(keys[i] for i in asked[:-1]) + ", and " + keys[asked[-1]]
        template = (
            "Some special magic {type} are hidden within the following text. Make sure to memorize "
            "it. I will quiz you about the {type} afterwards.\n{context}\nWhat are all the special "
            "magic {type} for {query} mentioned in the provided text?"
            " The special magic {type} for {query} mentioned in the provided text are"
        )
        kind = task.value
        if task.q * task.v == 1:
            template = template.replace("Some", "A").replace("are all", "is")
            template = template.replace("are", "is").replace("answers", "answer")
            kind = kind[:-1]
        return template.format(type=kind, context=context, query=query), answers

    def tokens(text: str) -> int:
        return len(tokenize(text)) + 128

    step = 500 if task.haystack == "essay" else 25
    if max_seq_length < 4096 and task.haystack != "essay":
        step = 5
    text, _ = generate(step)
    low, high = step, max(int(max_seq_length / (len(tokenize(text)) / step) * 3), 2 * step)
    best = step
    while low <= high:
        middle = (low + high) // 2
        text, _ = generate(middle)
        if tokens(text) <= max_seq_length:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    rows = []
    for index in range(num_samples):
        used = best
        text, answers = generate(used)
        while tokens(text) > max_seq_length:
            if used > step:
                used -= step
            text, answers = generate(used)
        place = text.rfind(" The speci")
        row = (index, text[:place], text[place:], answers, tokens(text))
        rows.append(dict(zip(FIELDS, row, strict=True)))
    return rows


def rows_of(examples: list[NeedleExample]) -> list[dict[str, Any]]:
    return [example.to_row(index) for index, example in enumerate(examples)]


def some_lengths() -> list[Any]:
    """The shortest with every task, and one more; at 4,096 tokens the steps change where the
    haystack is no essay. All with all in `make slow`."""
    params = []
    for number, (name, task) in enumerate(SPECIFIED.items()):
        for place, sizes in enumerate([(1900, 42), (4095, 7), (4096, 42), (6000, 0)]):
            is_step = task.haystack != "essay" and place in (1, 2)
            is_fast = place == 0 or place == 1 + number % 3 or is_step
            params.append(pytest.param(name, *sizes, marks=() if is_fast else pytest.mark.slow))
    return params


@pytest.mark.parametrize(("name", "length", "seed"), some_lengths())
def test_examples_are_those_of_the_slow_reimplementation(
    name: str, length: int, seed: int, tokenizer: Any, build: Any, essay_words: list[str]
) -> None:
    expected = slow_rows(SPECIFIED[name], length, 4, seed, tokenizer.tokenize, essay_words)
    rows = rows_of(build(name, length, 4, seed))
    assert tuple(TASKS) == tuple(SPECIFIED)
    assert tuple(SPECIFIED)[:6] == needles.PAPER_TASKS
    assert rows == expected
    assert {tuple(row) for row in rows} == {FIELDS}  # the order in the file


def test_examples_where_the_smallest_haystack_fits_only_sometimes_are_drawn_until_it_does(
    tokenizer: Any, essays: Essays, build: Any, essay_words: list[str]
) -> None:
    name, rng = "niah_single_3", random.Random(1)
    task = TASKS[name]
    prompts = [write_example(task, 500, rng, 1, Material(essays, WORDS)).prompt for _ in range(30)]
    lengths = sorted(len(tokenizer.tokenize(prompt)) + 128 for prompt in prompts)
    tight = lengths[6]
    assert tight < lengths[-1]
    arguments = (SPECIFIED[name], tight, 8, 42, tokenizer.tokenize, essay_words)
    assert rows_of(build(name, tight, 8)) == slow_rows(*arguments)


def test_a_length_that_no_haystack_fits_is_refused_with_one_that_would(build: Any) -> None:
    for name in ("niah_single_2", "niah_multikey_3"):
        with pytest.raises(needles.DoesNotFitError, match=rf"{name} .* 300 ") as error:
            build(name, 300, 2)
        needed = max(map(int, re.findall(r"\d+", str(error.value).partition("needs")[2])))
        assert len(build(name, needed + 8, 2)) == 2  # a few more tokens, for other draws


def test_a_tokenizer_that_cannot_spell_a_needle_is_refused(essays: Essays) -> None:
    # Letters alone: digits vanish.
    signs = {sign: i for i, sign in enumerate([*" .:-", *string.ascii_letters])}
    lacking = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(signs, [])))
    with pytest.raises(UserError, match="0123456789-abcdef"):
        build_examples(TASKS["niah_single_1"], 4096, 1, 42, lacking, Material(essays, WORDS))


def test_lengths_are_what_tokenize_counts_whatever_the_tokenizer_file_asks_for(
    tokenizer: Any, essays: Essays, build: Any, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    cutting = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    cutting.backend_tokenizer.enable_truncation(64)
    cutting.backend_tokenizer.enable_padding(length=64)
    task, material = TASKS["niah_multikey_1"], Material(essays, WORDS)
    examples = build_examples(task, 4096, 3, 42, cutting, material)
    assert examples == build(task.name, 4096, 3)
    assert examples[0].length == len(tokenizer.tokenize(examples[0].prompt)) + 128


@pytest.mark.parametrize("name", TASKS)
def test_toy_sizes_fill_a_short_length(name: str, tokenizer: Any, build: Any) -> None:
    state = random.getstate()
    for length in (700, 2048):
        examples = build(name, length, 5, 1, needles.TOY_SIZES)
        assert examples[:3] == build(name, length, 3, 1, needles.TOY_SIZES)
        for example in examples:
            assert length - 150 <= example.length <= length
            assert example.length == len(tokenizer.tokenize(example.prompt)) + 40
    assert random.getstate() == state  # the global generator is left alone


def test_other_keys_of_a_context_can_be_asked_too(essays: Essays) -> None:
    task = replace(TASKS["niah_single_3"], num_keys=3, keys="uuids")
    example = write_example(task, 300, random.Random(2), 2, Material(essays, WORDS))
    others = needles.ask_other_keys(task, example)
    values = dict(example.pairs)
    keys = [key for key in example.keys if key != example.queries[0]]
    assert len(keys) == 2
    for key, question in zip(keys, others, strict=True):
        prefix = example.answer_prefix.replace(example.queries[0], key)
        asked = f"What is the special magic uuid for {key} mentioned in the provided text?"
        assert question.prompt == asked + prefix
        assert question.outputs == (values[key],)


@given(seed=st.integers(0, 2**16), name=st.sampled_from(sorted(TASKS)))
def test_distances_of_needles(tokenizer: Any, essays: Essays, seed: int, name: str) -> None:
    """They count the tokens from each asked needle on."""
    task = replace(TASKS[name], keys="uuids")
    example = write_example(task, 60, random.Random(seed), 1, Material(essays, WORDS))
    tokens = tokenizer(example.prompt, add_special_tokens=False)["input_ids"]
    distances = needles.needle_distances(example, tokenizer)
    assert len(distances) == len(example.outputs)
    asked = [needle for needle in example.needles if needle.asked]
    for needle, distance in zip(asked, distances, strict=True):
        # The last `distance` tokens hold the whole sentence, and one token fewer does not.
        assert needle.sentence in tokenizer.decode(tokens[-distance:])
        assert needle.sentence not in tokenizer.decode(tokens[-distance + 1 :])


# --- the words that keys are drawn from: indexing gives the items of a list that is never built ---

# Few letters and the characters around the hyphen's place in the order of ASCII.
WORD = st.text("ab-. ", max_size=4)


def built(adjectives: list[str], nouns: list[str]) -> list[str]:
    return sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})


# The block of high-pitched- is inside that of high-, between its nouns.
@hypothesis.example(
    "high high-pitched higher".split(), "pit pitched pitcher pot arm-rest TV".split()
)
@hypothesis.example(["a", "a-b", "a-b-c", "a-d"], ["b", "c", "z"])
# A noun may begin like the longer adjective, and even give the same word.
@hypothesis.example(["high", "high-pitched"], ["pitched-bed", "pitched-sofa", "bed", "zoo"])
@hypothesis.example(["ad hoc", "ad", "ad hoc"], ["lens", "contact lens"])
@given(st.lists(WORD, min_size=1, max_size=12), st.lists(WORD, min_size=1, max_size=12))
def test_items_are_those_of_the_sorted_list(adjectives: list[str], nouns: list[str]) -> None:
    words, expected = KeyWords(adjectives, nouns, "test"), built(adjectives, nouns)
    assert len(words) == len(expected)
    assert [words[index] for index in range(len(words))] == expected
    one, other = random.Random(7), random.Random(7)
    assert [one.choice(words) for _ in range(9)] == [other.choice(expected) for _ in range(9)]
    with pytest.raises(IndexError):
        words[len(expected)]


def test_wonderwords_gives_upstreams_list() -> None:
    pytest.importorskip("wonderwords", reason="word keys need the extra `eval`")
    words = wonderwords_keys()
    if words.name != "wonderwords 3.0.1":
        pytest.skip(f"the expectations are those of wonderwords 3.0.1, installed is {words.name}")
    assert len(words) == 6_171_620
    # From the whole list, built once: its ends, a middle, and around a block within a block.
    expected = {
        0: "Early-ATM",
        2_000_000: "foregoing-test",
        2_500_284: "high-pitch",
        2_500_285: "high-pitched-ATM",
        2_507_066: "high-pitched-zucchini",
        2_507_067: "high-pitcher",
        6_171_619: "zonked-zucchini",
    }
    assert {index: words[index] for index in expected} == expected


def test_our_words_hide_the_asked_key_once() -> None:
    """Of RULER's six million words it hardly comes again; of ours it stood twice in 6 to 8 % of
    the texts of 32,768 tokens."""
    task, words = TASKS["niah_multikey_2"], [f"word{number}" for number in range(200)]
    found = {True: 0, False: 0}
    for seed in range(40):
        for may_repeat in found:
            material = Material(None, words, keys_may_repeat=may_repeat)
            example = write_example(task, 100, random.Random(seed), 0, material)
            (key,) = example.queries
            found[may_repeat] += example.input.count(f" for {key} is")
    assert found[False] == 40
    assert found[True] > 45
