"""The suite longbench_v2, on rows made in its format."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bosch.assets import asset_folder
from bosch.config import EvaluationConfig
from bosch.eval import averages
from bosch.eval.suites import longbench_v2
from bosch.eval.suites._interface import Example, Request, Scored
from bosch.eval.suites.longbench_v2 import TASK, Settings, score
from bosch.run.errors import UserError
from bosch.run.kept import forget

ROW: dict[str, Any] = {"_id": "1", "domain": "Single-Document QA", "sub_domain": "Legal"}
ROW |= {"difficulty": "easy", "length": "short", "question": " Who has the key? ", "answer": "C"}
ROW |= {"choice_A": "Anna", "choice_B": "Bert", "choice_C": "Clara", "choice_D": "Dora"}
ROW |= {"context": "Clara has the key. It costs $Q$."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(asset_folder("tiny-qwen3"))


def write(folder: Path, *changes: dict[str, Any]) -> Settings:
    rows = [ROW | {"_id": str(number)} | change for number, change in enumerate(changes)]
    (folder / "data.json").write_text(json.dumps(rows))
    forget()
    return Settings(str(folder))


def test_a_prompt_is_longbenchs(tmp_path: Path, tokenizer: Any) -> None:
    settings = write(tmp_path, {})
    (one,) = longbench_v2.build_examples(settings, TASK, tokenizer)
    assert one.prompt == (
        "Please read the following text and answer the question below.\n\n<text>\n"
        # The document's own mark is filled too, as in LongBench.
        "Clara has the key. It costs Who has the key?.\n</text>\n\nWhat is the correct answer to "
        "this question: Who has the key?\nChoices:\n(A) Anna\n(B) Bert\n(C) Clara\n(D) Dora\n\n"
        'Format your response as follows: "The correct answer is (insert answer here)".'
    )
    letter = Settings(settings.data, mode="letter")
    (asked,) = longbench_v2.build_examples(letter, TASK, tokenizer)
    assert asked.prompt == one.prompt + "\n\nThe correct answer is ("
    assert asked.max_new_tokens == 1
    assert score(letter, TASK, asked, "C") == {"accuracy": 1}
    assert score(letter, TASK, asked, " C") == {"accuracy": 1}
    assert score(letter, TASK, asked, "the") == {"accuracy": 0}
    # What makes other examples is part of what stored ones are known by.
    others = [letter, replace(settings, max_prompt_tokens=9)]
    known = [longbench_v2.sources(one, TASK) for one in (settings, *others)]
    known.append(longbench_v2.sources(write(tmp_path, {"choice_B": "Bob"}), TASK))
    assert len({*map(str, known)}) == 4


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The correct answer is (C).", "C"),
        ("I think. **The correct answer is (B)** The correct answer is (A)", "B"),
        ("The correct answer is D", "D"),
        ("The correct answer is Apple", "A"),
        # The form with brackets counts before the other, wherever it stands.
        ("The correct answer is A. No: The correct answer is (B)", "B"),
        ("the correct answer is (C)", None),
        ("C", None),
        ("", None),
    ],
)
def test_the_letter_is_extracted_as_there(response: str, letter: str | None) -> None:
    for choice in "ABCD":
        example = Example(0, "", (choice,), 1)
        assert score(Settings(), TASK, example, response) == {"accuracy": choice == letter}


def test_long_prompts_lose_their_middle(tmp_path: Path, tokenizer: Any) -> None:
    settings, limit = longbench_v2.configure(Request(EvaluationConfig(samples=9), 393))
    assert (settings.max_prompt_tokens, limit) == (201, 9)
    settings = Settings(write(tmp_path, {"context": "Anna sleeps. " * 500}).data, "sentence", 201)
    (one,) = longbench_v2.build_examples(settings, TASK, tokenizer)
    assert one.facts["is_cut"]
    assert one.prompt.startswith("Please read the following")
    assert one.prompt.endswith('answer here)".')
    assert len(tokenizer(one.prompt)["input_ids"]) <= 203


def test_scores_by_difficulty_and_length(tmp_path: Path, tokenizer: Any) -> None:
    settings = write(tmp_path, {}, {"difficulty": "hard"}, {"length": "long"}, {"length": "medium"})
    examples = longbench_v2.build_examples(settings, TASK, tokenizer)
    said = ["The correct answer is (C)", "The correct answer is (C)", "", "The correct answer is A"]
    scored = [
        Scored(TASK, one, score(settings, TASK, one, text))
        for one, text in zip(examples, said, strict=True)
    ]
    rows = [vars(result) for result in averages.summarize(longbench_v2, settings, scored)]
    assert {row["task"]: (row["value"], row["n"]) for row in rows} == {
        "longbench_v2": (50, 4),
        "average": (50, 4),
        "easy": (33.33, 3),
        "hard": (100, 1),
        "short": (100, 2),
        "medium": (0, 1),
        "long": (0, 1),
        "uncut": (50, 4),
    }
    names = [one.name for one in longbench_v2.reported_scores(rows)]
    assert names == ["average", "easy", "hard", "short", "medium", "long", "uncut"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([ROW | {"choice_C": None}], r"question 1: the field `choice_C` must be a string"),
        ([ROW | {"choices": ["Anna"]}], r"question 1 has `choices`: lm-eval's copy"),
        ([ROW | {"answer": "E"}], r"question 1: the answer is 'E', not A, B, C or D"),
        ([ROW | {"context": 3}], r"question 1: the field `context` must be a string"),
        ({"a": 1}, "must hold a list of questions"),
        ('[{"a"', r"data\.json is not JSON"),
        (None, r"data\.json does not exist"),
    ],
)
def test_files_of_another_form_are_refused(content: Any, named: str, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    if content:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=named):
        longbench_v2.sources(Settings(str(path)), TASK)
