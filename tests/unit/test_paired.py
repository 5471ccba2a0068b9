"""A model beside another on the same examples: numbers worked out by hand, and the commands that
print them."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from bosch.assets import asset_folder
from bosch.eval.report.compare import compare
from bosch.eval.report.intervals import estimate, gap_at
from bosch.eval.report.page import recovery_rows
from bosch.eval.report.paired import beside_dense, pair, pair_evaluations
from bosch.eval.report.tables import dense_table, make_tables, paired_table
from bosch.eval.results import read_scores
from bosch.eval.rows import write_rows
from bosch.eval.suites._reporting import ReportedScore
from bosch.recipes import evaluate_model
from bosch.recipes.compare_runs import main as compare_runs
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import write_sealed_json
from tests.run_folders import FakeRun
from tests.stand_in_hub import write_text

CELLS = {("word", 512): 0.5, ("list", 512): 0.5}
SCORE = ReportedScore("own_formats", "average", "average", CELLS)


def test_difference_and_share_are_as_worked_out_by_hand() -> None:
    # Of the word's four the other answers two, and this one 1 of these and another one. Of the
    # list's two it has all of one and half of the other; this one half and all.
    ours = {("word", 512): {0: 100.0, 1: 0.0, 2: 100.0, 3: 0.0}, ("list", 512): {0: 50.0, 1: 100.0}}
    other = {
        ("word", 512): {0: 100.0, 1: 100.0, 2: 0.0, 3: 0.0},
        ("list", 512): {0: 100.0, 1: 50.0},
    }
    found = pair(SCORE, ours, other)
    assert found is not None
    assert (found.value, found.other, found.num_examples) == (62.5, 62.5, 6)
    assert found.difference.value == 0
    # word: 25 of 50, list: 50 of 75, the smaller parts; halves of both: 37.5 of 62.5
    assert found.kept.value == pytest.approx(0.6)
    low, high = found.difference.low, found.difference.high
    assert low is not None
    assert high is not None
    assert low < 0 < high
    same = pair(SCORE, other, other)
    assert same is not None
    assert (same.difference.low, same.difference.high, same.kept.value) == (0, 0, 1)


def test_a_run_is_judged_by_the_lengths_that_it_was_asked(tmp_path: Path) -> None:
    """Whichever run comes first in the report."""
    short = FakeRun("bosch", samples=40, lengths=(512,))
    folders = [run.write(tmp_path) for run in (short, FakeRun("fisher", samples=40))]
    for order in (folders, folders[::-1]):
        counts = {
            (run.method, paired.score.headline): paired.num_examples
            for run, _, paired in beside_dense(compare(order))
        }
        assert counts["fisher", "NIAH"] == 2 * counts["bosch", "NIAH"] > 0


def test_only_examples_that_both_answered_count() -> None:
    ours = {("word", 512): {0: 100.0, 5: 0.0}, ("list", 512): {0: 0.0, 1: 0.0}}
    other = {("word", 512): {0: 0.0, 1: 100.0}, ("list", 512): {0: 0.0, 1: 0.0}}
    found = pair(SCORE, ours, other)
    assert found is not None
    assert (found.value, found.other, found.num_examples) == (50, 0, 3)
    assert found.difference.low is None  # one example of the word is too few to resample
    assert found.kept.value is None  # the other answers nothing
    assert pair(SCORE, ours, {("word", 512): other["word", 512]}) is None
    assert pair(ReportedScore("x", "average", "average", {}), ours, other) is None


def test_a_comparison_shows_differences_from_the_dense_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(samples=20).write(tmp_path / "runs")
    comparison = compare([run])
    table = dense_table(comparison)
    assert make_tables(comparison)["dense"] == table
    steps = [row[1] for row in table.rows]
    assert steps == ["0", "200"] * len(comparison.headlines)
    # The same intervals as everywhere else in the report.
    score = comparison.headlines[0]
    curve = comparison.curves[run.name, score]
    expected = estimate([curve], gap_at(-1))
    found = pair(
        score, *(comparison.runs[0].samples[step, score.suite, ""] for step in (200, None))
    )
    assert found is not None
    assert (found.difference.low, found.difference.high) == (
        pytest.approx(expected.low), pytest.approx(expected.high),
    )  # fmt: skip
    assert found.kept.value is not None
    assert 0 < found.kept.value < 1
    rows = [row for row in recovery_rows(comparison) if "dense" in row["statistic"]]
    assert len(rows) == 2 * len(table.rows)
    (row,) = (
        row
        for row in rows
        if (row["suite"], row["step"]) == (score.suite, 200) and row["low"] == found.difference.low
    )
    assert row["statistic"] == "points_beside_dense"
    monkeypatch.chdir(tmp_path)
    compare_runs([str(run)])
    assert (tmp_path / "comparison" / "table.md").read_text().count(table.title) == 1
    without = FakeRun("razor", with_samples=False).write(tmp_path)
    assert not dense_table(compare([without])).rows


def test_an_evaluation_beside_another(tmp_path: Path) -> None:
    run = FakeRun(samples=20).write(tmp_path)
    hybrid, dense = (run / "eval" / name for name in ("step-000000", "dense"))
    for folder in (hybrid, dense):
        for path in folder.glob("*/scores.json"):
            content = json.loads(path.read_text()) | {"settings": {"seed": 42, "lengths": [512]}}
            path.write_text(json.dumps(content))
    found = {one.score.title: one for one in pair_evaluations(hybrid, dense)}
    assert {"NIAH average", "niah_single_1"} <= {*found}
    average = found["NIAH average"]
    assert average.value < average.other
    assert average.difference.high is not None
    assert average.difference.high < 0
    table = paired_table("beside", found.values())
    assert len(table.rows) == len(found)
    shared = run.parent / "shared" / "eval-dense"
    shutil.copytree(dense, shared)
    reference = run.parent / "two" / "eval" / "dense"
    reference.mkdir(parents=True)
    write_sealed_json(reference / "reference.json", {"folder": "../../../shared/eval-dense"})
    assert len([*pair_evaluations(hybrid, reference)]) == len(found)
    assert "LongBench average" in found  # of which there is no single example
    for folder in (hybrid, dense):  # of lm-eval's tasks neither
        (folder / "lm-eval").mkdir()
        row = read_scores(folder / "niah" / "scores.json")["rows"][0] | {"suite": "lm-eval"}
        (folder / "lm-eval" / "scores.json").write_text(json.dumps({"rows": [row]}))
    assert len([*pair_evaluations(hybrid, dense)]) == len(found)
    path = dense / "niah" / "scores.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"settings": {"seed": 42, "lengths": [1024]}}))
    assert len([*pair_evaluations(hybrid, dense)]) == len(found)  # other lengths of the same set
    path.write_text(json.dumps(content | {"settings": {"seed": 7, "lengths": [512]}}))
    with pytest.raises(UserError, match="on niah: their examples differ in seed 42 and 7"):
        [*pair_evaluations(hybrid, dense)]


def test_examples_of_another_tokenizer_are_not_paired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tokens are shorter, so less text fits into as many."""
    usual = asset_folder("tiny-qwen3-2layer")
    content = json.loads((usual / "tokenizer.json").read_text())
    del content["model"]["merges"][100:]
    shutil.copytree(usual, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(content))

    text = write_text(tmp_path / "text.jsonl", 400)

    def evaluate(model: Path, out: Path, essays: str = "toy", against: Path | None = None) -> Path:
        words = ["--suite", "own_formats", "--niah-essays", essays, "--niah-lengths", "256"]
        words += ["--samples", "2", "--options", "own_formats.tasks=word"]
        words += ["--against", str(against)] if against else []
        evaluate_model.main(["--model", str(model), *words, "--out", str(out)])
        return out

    first = evaluate(usual, tmp_path / "first")
    other = evaluate(tmp_path / "model", tmp_path / "other")
    assert [*pair_evaluations(first, first)]
    capsys.readouterr()
    evaluate(usual, tmp_path / "again", against=first)
    said = capsys.readouterr().out
    assert re.search(rf"^beside {first}:\nscore .*\nown formats average +2 ", said, re.M)
    with pytest.raises(UserError, match="on own_formats: 2 of 2 examples have another text"):
        [*pair_evaluations(first, other)]
    # A file's name may be written in other ways.
    (tmp_path / "link.jsonl").symlink_to(text)
    named = [f"text:{text}", f"text:{tmp_path / 'link.jsonl'}"]
    same = [evaluate(usual, tmp_path / f"same{n}", essays) for n, essays in enumerate(named)]
    assert [*pair_evaluations(*same)]
    path = other / "own_formats" / "predictions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:  # as earlier versions wrote them
        del row["example_xxh3"]
    write_rows(path, rows)
    assert [*pair_evaluations(first, other)]


def test_no_evaluation_to_compare_with_is_refused_before_work_begins(tmp_path: Path) -> None:
    settings = asdict(evaluate_model.Options("m", settings=None))  # type: ignore[arg-type]
    assert settings["against"] == ()
    with pytest.raises(MissingFileError, match="holds no evaluation"):
        evaluate_model.main(
            ["--model", "tiny-qwen3", "--against", str(tmp_path), "--out", str(tmp_path / "out")]
        )
