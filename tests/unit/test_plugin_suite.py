"""A suite is one new file: the example of docs/extending.md through the command lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.package_copy import PackageCopy, example_of_page

EVALUATE = ("bosch.recipes.evaluate_model", "--model", "tiny-qwen3-2layer", "--suite")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> PackageCopy:
    """The package with the example in its place."""
    copy = PackageCopy(tmp_path_factory.mktemp("copy"))
    copy.write("bosch/eval/suites/mine.py", example_of_page("eval/suites/mine.py"))
    return copy


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_example_runs_with_its_options(copy: PackageCopy, tmp_path: Path) -> None:
    out = tmp_path / "judged"
    options = ("--options", "mine.rows=5", "mine.largest=4")
    code, text, errors = copy.run(*EVALUATE, "mine", *options, "--out", str(out))
    assert code == 0, errors
    assert "sums" in text
    predictions = read_lines(out / "mine" / "predictions.jsonl")
    assert [row["index"] for row in predictions] == [0, 1, 2, 3, 4]
    (built,) = (tmp_path / "shared").rglob("*.jsonl")
    examples = read_lines(built)
    hits = [
        float(row["prediction"].split()[:1] == example["answers"])
        for row, example in zip(predictions, examples, strict=True)
    ]
    assert [row["scores"] for row in predictions] == [{"exact": hit} for hit in hits]
    assert max(int(example["answers"][0]) for example in examples) <= 8
    scores = json.loads((out / "mine" / "scores.json").read_text())
    assert scores["settings"] == {"rows": 5, "largest": 4}
    values = {row["task"]: (row["metric"], row["value"], row["n"]) for row in scores["rows"]}
    value = ("exact", 20 * sum(hits), 5)
    assert values == {"sums": value, "average": value}


def test_a_whole_run_is_judged_by_it(copy: PackageCopy, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    code, _, errors = copy.run(
        "bosch.recipes.recover",
        *("--preset", "smoke", "--zero-shot", "--method", "random_layers"),
        *("--eval.suites", "niah", "mine", "--eval.options", "mine.rows=2"),
        *("--run-dir", str(run)),
    )
    assert code == 0, errors
    rows = read_lines(run / "eval" / "results.jsonl")
    judged = {(row["step"], row["suite"]) for row in rows}
    assert judged == {(step, suite) for step in (None, 0) for suite in ("niah", "mine")}
    assert {row["n"] for row in rows if row["suite"] == "mine"} == {2}
