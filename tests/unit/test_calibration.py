"""The calibration set: shares, lengths, where answers and needles stand, and what it may not share
with the test set."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from bosch.calibration import Calibration, Haystack, Question, read_calibration, write_calibration
from bosch.data import calibration as sets
from bosch.data import needles
from bosch.data.toy_world.world import ToyEssays, World
from bosch.run.errors import UserError
from tests import odd_tokenizers
from tests.toy_tokenizer import train_tokenizer

SETTINGS = sets.CalibrationSettings(examples=28, length=700, questions_per_context=2, essays="toy")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(vocabulary_size=1200, num_texts=60, seed=0)


@pytest.fixture(scope="module")
def contexts(tokenizer: PreTrainedTokenizerFast) -> list[sets.ContextText]:
    return sets.build_contexts(SETTINGS, sets.gather_material(SETTINGS), tokenizer)


def test_answers_and_needles_are_where_the_set_says_and_fill_the_length(
    contexts: list[sets.ContextText], tokenizer: PreTrainedTokenizerFast
) -> None:
    # Equal shares; the remainder goes to the first tasks.
    shares = dict(zip(needles.PAPER_TASKS, [3, 3, 2, 2, 2, 2], strict=True))
    assert Counter(context.task for context in contexts) == shares
    for context in contexts:
        haystack = sets.encode(context, tokenizer)
        assert SETTINGS.length * 0.75 < len(haystack.ids_T) <= SETTINGS.length
        assert tokenizer.decode(haystack.ids_T) == context.text
        assert len(haystack.questions) == len(set(context.answers)) == len(set(context.pieces)) == 2
        for question, (prompt, _), (value,) in zip(
            haystack.questions, context.pieces, context.answers, strict=True
        ):
            answer = haystack.ids_T[question.answer.start : question.answer.stop]
            assert tokenizer.decode(answer) == f" {value}"
            needle = tokenizer.decode(haystack.ids_T[question.needle.start : question.needle.stop])
            assert str(needle).strip().startswith("One of the special magic")
            assert str(needle).strip().endswith(f"is: {value}.")
            before = tokenizer.decode(haystack.ids_T[: question.answer.start])
            assert str(before).endswith(prompt[-60:])


def test_answers_follow_as_the_model_reads_them_where_a_tokenizer_begins_with_a_blank() -> None:
    tokenizer = odd_tokenizers.wrap(odd_tokenizers.blank_first())
    settings = sets.CalibrationSettings(2, 1200, 2, ("niah_single_2",), "toy")
    for context in sets.build_contexts(settings, sets.gather_material(settings), tokenizer):
        haystack = sets.encode(context, tokenizer)
        assert haystack.ids_T.tolist() == tokenizer(context.text)["input_ids"]
        for question, (value,) in zip(haystack.questions, context.answers, strict=True):
            answer = haystack.ids_T[question.answer.start : question.answer.stop]
            assert tokenizer.decode([*tokenizer("is")["input_ids"][1:], *answer]) == (f"is {value}")


def test_set_shares_nothing_with_the_toy_test_set(
    contexts: list[sets.ContextText], tokenizer: PreTrainedTokenizerFast
) -> None:
    essays, words = ToyEssays("test", 42), World("test", 42).key_words
    material = needles.Material(essays, words, needles.TOY_SIZES)
    texts = [
        example.prompt
        for name in needles.PAPER_TASKS
        for example in needles.build_examples(needles.TASKS[name], 512, 4, 42, tokenizer, material)
    ]
    own = [context.text for context in contexts]
    assert sets.check_disjoint(own, texts) == 24
    leaked = needles.NEEDLE_PATTERN.search(own[5])
    assert leaked is not None
    with pytest.raises(UserError, match="test example 2"):
        sets.check_disjoint(own, [texts[0], f"The grass is green. {leaked[0]} The sky is blue."])


def test_the_seed_decides_the_bytes(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    found = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        settings = sets.CalibrationSettings(examples=6, length=512, essays="toy", seed=seed)
        (tmp_path / name).mkdir()
        written = sets.write_set(
            tmp_path / name, settings, tokenizer, "hash", test_texts=["a text"]
        )
        found.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert found[0] == found[1]
    assert set(found[0]) == {"calibration.safetensors", "examples.jsonl", sets.FACTS}
    facts = json.loads(found[0][sets.FACTS])
    assert (facts["questions"], facts["test_examples_compared"]) == (6, 1)
    read = read_calibration(tmp_path / "three")
    assert [h.questions for h in read.haystacks] == [h.questions for h in written.haystacks]
    values = [set(re.findall(rb"\b\d{7}\b", files["examples.jsonl"])) for files in found[1:]]
    assert values[0]
    assert not values[0] & values[1]


def test_damaged_set_is_one_sentence_that_names_the_file(tmp_path: Path) -> None:
    ids = torch.arange(6)
    question = Question(range(1, 2), range(2), "niah_single_1")
    texts = [Haystack(ids[:4], (question,)), Haystack(ids[4:], (question,))]
    write_calibration(tmp_path, Calibration(texts))
    path = tmp_path / "calibration.safetensors"
    assert [h.questions for h in read_calibration(tmp_path).haystacks] == [(question,)] * 2
    whole = load_file(path)
    for name, value in (
        ("ids", [1, 2, 3]),  # fewer than the texts have
        ("ends", [6, 4]),
        ("ends", []),
        ("questions", [[0, 1, 2, 0, 2], [1, 1, 3, 0, 1]]),  # beyond its end
        ("questions", [[0, 1, 2, 0, 2], [-1, 1, 2, 0, 1]]),
    ):
        tensors = whole | {name: torch.tensor(value, dtype=torch.long)}
        save_file(tensors, path, {"tasks": json.dumps(["niah_single_1"] * 2)})
        with pytest.raises(UserError, match=str(path)):
            read_calibration(tmp_path)
    path.write_bytes(b"{")
    with pytest.raises(UserError, match=str(path)):
        read_calibration(tmp_path)


def test_essays_give_another_region(tokenizer: PreTrainedTokenizerFast, shared_data: Path) -> None:
    pytest.importorskip("wonderwords")
    essays = shared_data / "pg_essays.json"
    settings = sets.CalibrationSettings(1, 5000, 1, ("niah_single_2",), str(essays))
    (context,) = sets.build_contexts(settings, sets.gather_material(settings), tokenizer)
    text = json.loads(essays.read_text())["text"]
    first_words = " ".join(text.split()[:8])
    assert first_words not in " ".join(context.text.split())
