"""The NIAH suite: rows as RULER writes them, scores and averages as the paper reports them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bosch.data.essays import read_essays
from bosch.data.key_words import wonderwords_keys
from bosch.data.needles import TASKS, Material
from bosch.data.needles import build_examples as build_needles
from bosch.eval import averages
from bosch.eval.suites import niah
from bosch.eval.suites._interface import Example, LeftOutError, Scored, Stop, Task
from tests.odd_tokenizers import one_token_a_byte


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return one_token_a_byte()


def make_scored(task: Task, scores: list[float]) -> list[Scored]:
    return [
        Scored(task, Example(i, "", (), 1), {"string_match_all": s, "string_match_part": s})
        for i, s in enumerate(scores)
    ]


def test_real_essays_give_known_words(tokenizer: Any, tmp_path: Path, shared_data: Path) -> None:
    pytest.importorskip("wonderwords")
    essays, out = shared_data / "pg_essays.json", tmp_path / "rows.jsonl"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = f"build --task niah_single_2 --length 4200 --samples 2 --seed 42 --essays {essays}"
    niah.main([*words.split(), "--tokenizer", str(tmp_path / "tokenizer"), "--out", str(out)])
    material = Material(read_essays(essays), wonderwords_keys())
    expected = build_needles(TASKS["niah_single_2"], 4200, 2, 42, tokenizer, material)
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert rows == [example.to_row(i) for i, example in enumerate(expected)]
    assert rows[0]["length"] == len((rows[0]["input"] + rows[0]["answer_prefix"]).encode()) + 128
    assert rows[0]["input"].startswith("A special magic number is hidden within the following")


def test_examples_say_what_generation_and_scoring_need(tokenizer: Any) -> None:
    settings, task = niah.Settings(samples=3), Task("niah_single_1", 700)
    examples = niah.build_examples(settings, task, tokenizer)
    assert [example.index for example in examples] == [0, 1, 2]
    for example in examples:
        assert len(example.prompt.encode()) + 40 == example.facts["length"] <= 700
        assert example.prompt.endswith("mentioned in the provided text is")
        assert (example.max_new_tokens, example.stop) == (40, Stop(when_answered=True))
        after_needle = example.prompt[example.prompt.index("One of the special") :]
        assert example.facts["needle_distances"] == [len(after_needle)]
        assert Example.from_row(json.loads(json.dumps(asdict(example)))) == example
    assert niah.build_examples(settings, task, tokenizer, limit=2) == examples[:2]


def test_a_task_that_does_not_fit_is_left_out_by_name(tokenizer: Any) -> None:
    with pytest.raises(LeftOutError, match="niah_multikey_3 cannot be built in 300 tokens"):
        niah.build_examples(niah.Settings(), Task("niah_multikey_3", 300), tokenizer)


def test_the_average_of_the_papers_row_is_the_mean_of_its_eight_numbers() -> None:
    # Table 1, the original 1.7B model: single and multikey at 4k to 32k, average 92.7.
    paper = {"single": (100, 99.9, 100, 100), "multikey": (98.9, 94.9, 84.1, 63.9)}
    scored = []
    for group, values in paper.items():
        for length, value in zip(niah.PAPER_LENGTHS, values, strict=True):
            for name in niah.GROUPS[group]:
                hits = round(value * 10)
                scored += make_scored(Task(name, length), [1.0] * hits + [0.0] * (1000 - hits))
    results = averages.summarize(niah, niah.Settings(lengths=niah.PAPER_LENGTHS), scored)
    groups = {(r.task, r.length): r.value for r in results if r.task in paper}
    assert groups == {
        (group, length): pytest.approx(value)
        for group, values in paper.items()
        for length, value in zip(niah.PAPER_LENGTHS, values, strict=True)
    }
    (total,) = [result for result in results if result.task == "average"]
    assert round(total.value, 1) == 92.7
    assert total.n == 24_000


def test_a_length_of_which_nothing_could_be_built_leaves_no_average() -> None:
    scored = [item for name in niah.Settings.tasks for item in make_scored(Task(name, 512), [1.0])]
    for lengths, has_average in (((512,), True), ((64, 512), False)):
        results = averages.summarize(niah, niah.Settings(lengths=lengths), scored)
        assert ("average" in {result.task for result in results}) == has_average


def test_the_floor_counts_needles_wholly_inside_the_window() -> None:
    for distances, at_100 in (([100], 1), ([101, 40], 0.5), ([900], 0)):
        answers = ("1", "2")[: len(distances)]
        example = Example(0, "", answers, 1, facts={"needle_distances": distances})
        assert (niah.floor(example, 100), niah.floor(example, 39)) == (at_100, 0)
