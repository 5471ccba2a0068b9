"""The suite long_answers: its examples, and scores of answers that go wrong in known ways."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer

from bosch.assets import asset_folder
from bosch.config import EvaluationConfig
from bosch.eval import averages
from bosch.eval.suites import long_answers
from bosch.eval.suites._interface import Example, LeftOutError, Request, Scored, Task
from bosch.eval.suites.long_answers import QUARTERS, REQUESTS, Settings, build_examples, score
from bosch.run.errors import UserError

LENGTH = 900
SETTINGS = Settings(lengths=(LENGTH,), answer_tokens=160, samples=3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(asset_folder("tiny-qwen3"))


def example(task: str, tokenizer: Any, index: int = 0) -> Example:
    return build_examples(SETTINGS, Task(task, LENGTH), tokenizer)[index]


def answer(example: Example) -> list[str]:
    return [f"{number}. {line}" for number, line in enumerate(example.answers, 1)]


def scores(task: str, example: Example, lines: list[str]) -> dict[str, float]:
    return score(SETTINGS, Task(task), example, "\n".join(lines).removeprefix("1."))


@pytest.mark.parametrize("task", REQUESTS)
def test_an_example_fits_and_its_answer_is_all_right(task: str, tokenizer: Any) -> None:
    for index in range(3):
        one = example(task, tokenizer, index)
        assert one == example(task, tokenizer, index)
        ids = tokenizer(one.prompt)["input_ids"]
        assert LENGTH - 60 < len(ids) + one.max_new_tokens <= LENGTH
        assert len(one.answers) >= 4
        found = scores(task, one, answer(one))
        assert {name for name, value in found.items() if value != 1} == {"loops"}
        # All sources are before the filler, and a window over everything sees them.
        assert long_answers.floor(one, 64) == 0
        assert long_answers.floor(one, 2 * LENGTH) == 1
    assert example(task, tokenizer).prompt != example(task, tokenizer, 1).prompt


def test_every_answer_is_found_in_the_list(tokenizer: Any) -> None:
    recited, looked_up = example("recite", tokenizer), example("lookup", tokenizer)
    assert list(recited.answers) == recited.facts["given"]
    assert sorted(looked_up.answers) == sorted(looked_up.facts["given"])
    assert list(looked_up.answers) != looked_up.facts["given"]
    asked = looked_up.prompt.rpartition("Keys in order:\n")[2].split("\n\n")[0].splitlines()
    assert [line.split(". ")[1] for line in asked] == [a.split(":")[0] for a in looked_up.answers]


def test_lines_are_scored_by_their_numbers(tokenizer: Any) -> None:
    one = example("recite", tokenizer)
    count, lines = len(one.answers), answer(one)
    whole = (count - 1) / count
    without_2 = scores("recite", one, [lines[0], *lines[2:]])
    assert without_2["lines"] == pytest.approx(whole)
    assert without_2["prefix"] == pytest.approx(1 / count)
    assert without_2["quarter_4"] == 1
    assert without_2["quarter_1"] < 1
    digit = scores("recite", one, [*lines[:-1], lines[-1][:-1] + "x"])
    assert (digit["lines"], digit["quarter_1"]) == (pytest.approx(whole), 1)
    assert digit["quarter_4"] < 1
    from_0 = [f"{number}. {line}" for number, line in enumerate(one.answers)]
    assert score(SETTINGS, Task("recite"), one, "\n" + "\n".join(from_0))["lines"] == 0
    assert score(SETTINGS, Task("recite"), one, "")["lines"] == 0
    empty = scores("recite", one, [lines[0], "2.", *lines[2:]])  # takes no other line with it
    assert empty["lines"] == pytest.approx(whole)
    looping = scores("recite", one, [*lines[:3], *[lines[2]] * 20])
    assert (looping["loops"], looping["lines"]) == (1, pytest.approx(3 / count))


def test_a_carried_error_is_told_from_a_lost_step(tokenizer: Any) -> None:
    one = example("running", tokenizer)
    (*_, start, _, sign, number) = one.facts["given"][0].split()  # start with 7, then add 2
    first = int(start[:-1]) + int(number) * (1 if sign == "add" else -1)
    assert one.answers[0] == str(first)  # the other totals are right by `local` above
    off_by_one = [*one.answers[:1], *(str(int(total) + 1) for total in one.answers[1:])]
    found = scores("running", one, [f"{n}. {total}" for n, total in enumerate(off_by_one, 1)])
    count = len(one.answers)
    assert found["lines"] == pytest.approx(1 / count)
    assert found["local"] == pytest.approx((count - 1) / count)


def test_the_report_gets_a_score_for_each_quarter(tokenizer: Any) -> None:
    scored = []
    for task in REQUESTS:
        for index in range(2):
            one = example(task, tokenizer, index)
            half = answer(one)[: len(one.answers) // 2]
            scored.append(Scored(Task(task, LENGTH), one, scores(task, one, half)))
    rows = [vars(result) for result in averages.summarize(long_answers, SETTINGS, scored)]
    found = {row["task"]: row["value"] for row in rows if row["task"] in (*QUARTERS, "average")}
    assert found["quarter_1"] == 100
    assert found["quarter_4"] == 0
    assert 40 < found["average"] <= 50
    reported = long_answers.reported_scores(rows)
    assert [score.name for score in reported] == ["average", *QUARTERS]


def test_what_cannot_be_is_refused(tokenizer: Any) -> None:
    with pytest.raises(LeftOutError, match=r"recite of \d+ lines cannot be built in 100 tokens"):
        build_examples(SETTINGS, Task("recite", 100), tokenizer)
    with pytest.raises(UserError, match="'recall' is not a task"):
        replace(SETTINGS, tasks=("recall",))
    with pytest.raises(UserError, match="answer_tokens"):
        replace(SETTINGS, answer_tokens=3)
    settings, limit = long_answers.configure(Request(EvaluationConfig(samples=7), 4_096))
    assert (settings.lengths[0], limit) == (4_096, 7)
