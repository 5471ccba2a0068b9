"""The suite own_formats: what its examples hide, and what counts as an answer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bosch.assets import asset_folder
from bosch.config import EvaluationConfig
from bosch.data import needle_text, needles
from bosch.data.essays import Essays, SentenceEnds
from bosch.eval import averages
from bosch.eval.settings import configure_suites
from bosch.eval.suites import niah, own_formats
from bosch.eval.suites._interface import Example, LeftOutError, Request, Scored, Task
from bosch.eval.suites.own_formats import NUM_KEYS, Settings, build_examples, score
from bosch.run.errors import UserError

LENGTH = 600
SETTINGS = Settings(lengths=(LENGTH,), samples=3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(asset_folder("tiny-qwen3"))


def right(example: Example, prediction: str) -> float:
    return score(SETTINGS, Task("any"), example, prediction)["right"]


@pytest.mark.parametrize("name", NUM_KEYS)
def test_an_example_fits_and_hides_its_answer_once(name: str, tokenizer: Any) -> None:
    examples = build_examples(SETTINGS, Task(name, LENGTH), tokenizer)
    assert examples == build_examples(SETTINGS, Task(name, LENGTH), tokenizer)
    assert examples[:2] == build_examples(SETTINGS, Task(name, LENGTH), tokenizer, 2)
    assert len({one.prompt for one in examples}) == 3
    for one in examples:
        ids = tokenizer(one.prompt)["input_ids"]
        assert LENGTH - 60 < len(ids) + one.max_new_tokens <= LENGTH
        assert not needles.pairs_in(one.prompt)  # of calibration sets
        text, _, question = one.prompt.rpartition("\n\nQuestion: ")
        assert all(answer in text and answer not in question for answer in one.answers)
        answer = " " + ", ".join(one.answers)
        assert len(tokenizer(answer)["input_ids"]) <= one.max_new_tokens
        assert right(one, answer + " and so on.") == 1
        # The window of the last token sees the needle from its first token on.
        (distance,) = one.facts["distances"]
        seen = tokenizer.decode(ids[-distance:])
        assert all(answer in seen for answer in one.answers)
        assert [own_formats.floor(one, size) for size in (distance - 1, distance)] == [0, 1]


def test_one_of_several_sentences_is_asked_for(tokenizer: Any) -> None:
    examples = build_examples(replace(SETTINGS, samples=30), Task("keys_4", LENGTH), tokenizer)
    first = 0
    for one in examples:
        text, _, question = one.prompt.rpartition("\n\nQuestion: ")
        numbers = own_formats.NUMBER.findall(text)
        assert len(set(numbers)) == 4
        first += numbers[0] == one.answers[0]
        begin = question.rpartition("Answer: ")[2]
        assert one.answers[0] in text[text.index(begin.split()[-1]) :]
        assert right(one, f" {numbers[0]} or {one.answers[0]}") == (numbers[0] == one.answers[0])
    assert 2 <= first <= 15  # the asked one is not always the first in the text


def test_a_record_is_json_and_its_answer_a_field(tokenizer: Any) -> None:
    fields = set()
    for one in build_examples(replace(SETTINGS, samples=12), Task("json", LENGTH), tokenizer):
        (line,) = (line for line in one.prompt.splitlines() if line.startswith('{"'))
        record = json.loads(line)
        begin = one.prompt.rpartition("Answer: ")[2]
        whole = json.loads(begin + json.dumps(one.answers[0]) + "}")
        (field,) = whole.keys() - {"person"}
        assert (record["person"], str(record[field])) == (whole["person"], one.answers[0])
        fields.add(field)
    assert len(fields) > 2


def test_only_the_first_number_or_words_count() -> None:
    number, word = Example(0, "", ("12345",), 8), Example(0, "", ("falcon",), 8)
    for text, value in {
        " 12345.": 1, " 12,345 crowns, not 777": 1, "12345": 1, "the code 12345": 1,
        " 123456": 0, " 9, then 12345": 0, " 012345": 0, "": 0, " twelve": 0,
    }.items():  # fmt: skip
        assert right(number, text) == value, text
    for text, value in {
        ' "falcon"}': 1, " Falcon": 1, " big falcon": 1, " falcons": 0, " badger, falcon": 0,
    }.items():  # fmt: skip
        assert right(word, text) == value, text
    five = Example(0, "", ("rake", "harp", "drum", "lemon", "canoe"), 8)
    assert right(five, " a rake, a harp, a drum, a lemon and a canoe.") == 1
    assert right(five, " rake, drum, harp, lemon") == pytest.approx(2 / 5)
    assert right(five, " rake, harp") == pytest.approx(2 / 5)


def test_the_text_is_the_users_own(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Only this stands here. It has two sentences."
    ends = SentenceEnds([len("Only this stands here.")], {})
    essays = Essays(text.split(" "), ends, "mine.txt", "f" * 64)
    monkeypatch.setattr(niah, "load_essays", lambda source, punkt: essays)
    settings = replace(SETTINGS, essays="mine.txt", lengths=(200,))
    for one in build_examples(settings, Task("word", 200), tokenizer):
        body = one.prompt.removeprefix(own_formats.INTRO).partition("\n\nQuestion: ")[0]
        sentences = [each.strip() + "." for each in body.split(".") if each]
        hidden = [each for each in sentences if each not in text]
        assert len(hidden) == 1 < len(sentences) - 5
        assert one.answers[0] in hidden[0]
    assert own_formats.files(settings) == {"essays": "mine.txt"}
    facts = own_formats.sources(settings, Task("word", 200))
    assert facts == {"samples": "3", "seed": "42", "essays": "f" * 64}


def test_a_training_text_gives_the_passages_that_no_calibration_has(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "text.jsonl"
    words = (f"w{number:05}{'.' if number % 9 == 8 else ''}" for number in range(20_000))
    path.write_text(json.dumps({"text": " ".join(words)}) + "\n")
    settings = replace(SETTINGS, essays=f"text:{path}", samples=5)
    calibration = needle_text.make_haystack(settings.essays, LENGTH, "calibration").words
    for one in build_examples(settings, Task("list", LENGTH), tokenizer):
        words_of_text = {word for word in one.prompt.split() if word.startswith("w")}
        assert len(words_of_text) > 50
        assert words_of_text.isdisjoint(calibration)
    assert own_formats.files(settings) == {}
    (digest,) = own_formats.hashes(settings).values()
    assert digest


def test_the_average_is_of_the_tasks_at_each_length() -> None:
    scored = [
        Scored(Task(name, length), Example(0, "", ("7",), 8), {"right": float(name == "word")})
        for length in (100, 200)
        for name in ("word", "json")
        if (name, length) != ("json", 200)
    ]
    found = averages.summarize(own_formats, SETTINGS, scored)
    means = {result.length: result.value for result in found if result.task == "average"}
    assert means == {100: 50, 200: 100, 0: pytest.approx(200 / 3)}


def test_what_cannot_be_is_refused(tokenizer: Any) -> None:
    with pytest.raises(LeftOutError, match="keys_8 cannot be built in 90 tokens"):
        build_examples(SETTINGS, Task("keys_8", 90), tokenizer)
    with pytest.raises(UserError, match="'keys_9' is not a task"):
        replace(SETTINGS, tasks=("keys_9",))
    config = EvaluationConfig(samples=7, niah_lengths=(1_024,), niah_essays="mine.txt")
    settings, limit = own_formats.configure(Request(config, 4_096))
    assert (settings.lengths, settings.essays, limit) == ((1_024,), "mine.txt", 7)


@pytest.mark.parametrize("count", [10, 200])
def test_a_count_that_is_named_for_the_suite_alone_is_asked(count: int) -> None:
    config = EvaluationConfig(niah_samples=25, options=(f"own_formats.samples={count}",))
    alone, usual = configure_suites(["own_formats", "niah"], Request(config, 4_096))
    assert (alone.limit, alone.settings.samples, usual.limit) == (count, count, 25)
