"""A suite of one's own in reports and TensorBoard: with the defaults, and with what its file says.

Numbers by hand. `reading` has two lengths, `counting` has none; four examples each.
"""

import sys
from pathlib import Path
from statistics import fmean

import pytest

import bosch.eval.suites
from bosch.config import EvaluationConfig
from bosch.eval.averages import task_results
from bosch.eval.report.compare import Comparison, compare
from bosch.eval.report.page import summarize, write_report
from bosch.eval.report.runs import append_run, read_run
from bosch.eval.report.tables import make_tables
from bosch.eval.report.tensorboard import rebuild_tensorboard
from bosch.eval.runner import until_stop
from bosch.eval.settings import Label, configure_suites
from bosch.eval.suites import niah
from bosch.eval.suites._interface import Example, Request, Scored, Task
from bosch.run.errors import UserError
from tests.run_folders import STEP_TOKENS, FakeRun, write_suite
from tests.smoke_chain import points

READING = (Task("reading", 128), Task("reading", 256))
COUNTING = Task("counting")
# How many of the four are right by the metric `exact`; by `strict` it is half as many.
RIGHT = {
    None: {READING[0]: 4, READING[1]: 4, COUNTING: 4},
    0: {READING[0]: 0, READING[1]: 2, COUNTING: 0},
    100: {READING[0]: 2, READING[1]: 4, COUNTING: 4},
}
OWN_REPORT = '''
"""A suite that says how it is reported."""

from bosch.eval.suites._reporting import ReportedScore

title = "Weighted suite"
report_order = 0
parts_title = "skills"
tasks_by_length = ("reading",)


def headline_metric(task):
    return "strict"


def reported_scores(rows):
    weights = {("reading", 128): 0.25, ("counting", 0): 0.75}
    parts = [ReportedScore("weighted", "numbers", "part", {("counting", 0): 1.0})]
    return [ReportedScore("weighted", "average", "average", weights), *parts]
'''


def add_results(run: Path, suite: str) -> None:
    """The suite's evaluations beside those of the run."""
    for step, right in RIGHT.items():
        scored = [
            Scored(task, Example(i, "", ("7",), 8), {"exact": i < n, "strict": i < n / 2})
            for task, n in right.items()
            for i in range(4)
        ]
        results = task_results(scored, lambda task, scores: 100 * fmean(scores))
        tokens = None if step is None else step * STEP_TOKENS
        label = Label(run.name, step, tokens)
        folder = run / "eval" / ("dense" if step is None else f"step-{step:06}") / suite
        write_suite(folder, label, scored, results, with_samples=True)


def values(comparison: Comparison, suite: str, name: str) -> list[float]:
    """At step 0 and step 100, and of the dense model."""
    curves = {(c.score.suite, c.score.name): c for c in comparison.curves.values()}
    return [*curves[suite, name].values, curves[suite, name].dense]


def test_a_suite_that_says_nothing_is_reported_by_the_mean_of_its_tasks(tmp_path: Path) -> None:
    run = FakeRun(steps=(None, 0, 100)).write(tmp_path / "runs")
    add_results(run, "mine")
    comparison = compare([run])
    assert comparison.suites == ["niah", "longbench", "mine"]
    # reading is the mean over its lengths: (0 + 50) / 2 and (50 + 100) / 2; counting is 0 and 100.
    assert values(comparison, "mine", "reading") == [25, 75, 100]
    assert values(comparison, "mine", "counting") == [0, 100, 100]
    assert values(comparison, "mine", "average") == [12.5, 87.5, 100]
    (recovery,) = (row for row in comparison.recoveries if row.curve.score.suite == "mine")
    assert recovery.gap_share.value == pytest.approx(75 / 87.5)
    assert recovery.gap_share.low is not None  # from the single predictions
    assert any("mine" in str(line) and "86%" in str(line) for line in summarize(comparison))
    tables = make_tables(comparison)
    assert tables["runs"].rows[0][-1] == "12.5 → 87.5 (100.0)"
    assert [row[2:] for row in tables["mine_lengths"].rows] == [
        ["100.0 ± 0.0", "100.0 ± 0.0"],
        ["0.0 ± 0.0", "50.0 ± 28.9"],
        ["50.0 ± 28.9", "100.0 ± 0.0"],
    ]
    assert tmp_path / "report" / "mine_tasks.png" in write_report(comparison, tmp_path / "report")
    rebuild_tensorboard(run)
    curves = points(run / "tb")
    assert curves["mine/reading/256/exact"] == [(0, 50), (100, 100)]


def test_a_suite_says_how_it_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suites = bosch.eval.suites
    # Reports call none of the functions.
    rest = [f"def {name}(*_): ..." for name in suites.NEEDS if name != "Settings"]
    folder = tmp_path / "suites"  # a copy of the folder of suites
    folder.mkdir()
    for path in Path(suites.__path__[0]).glob("*.py"):
        (folder / path.name).symlink_to(path.resolve())
    (folder / "weighted.py").write_text("\n".join([OWN_REPORT, "class Settings: ...", *rest]))
    monkeypatch.setattr(suites, "__path__", [str(folder)])
    monkeypatch.delitem(sys.modules, "bosch.eval.suites.weighted", raising=False)
    run = FakeRun(steps=(None, 0, 100)).write(tmp_path / "runs")
    add_results(run, "weighted")
    append_run(tmp_path / "rows.jsonl", read_run(run))
    for given in (run, tmp_path / "rows.jsonl"):
        comparison = compare([given])
        assert comparison.suites == ["weighted", "niah", "longbench"]
        # By the metric strict: reading at 128 has 0 and 25, counting 0 and 50; dense has 50.
        assert values(comparison, "weighted", "average") == [0, 0.25 * 25 + 0.75 * 50, 50]
        tables = make_tables(comparison)
        assert tables["runs"].rows[0][7] == "0.0 → 43.8 (50.0)"
        assert tables["weighted_lengths"].rows[2][2:] == ["25.0 ± 25.0", "50.0 ± 28.9"]
        (recovery,) = (row for row in comparison.recoveries if row.curve.score.suite == "weighted")
        assert recovery.gap_share.low is not None
    written = write_report(comparison, tmp_path / "report")
    assert tmp_path / "report" / "weighted_skills.png" in written
    write_report(compare([FakeRun("fisher", steps=(0,)).write(tmp_path)]), tmp_path / "report")
    assert not (tmp_path / "report" / "weighted_skills.png").exists()  # of the report before


def test_what_follows_a_stop_string_is_not_scored() -> None:
    """Generation ends with a whole token, which may reach past it."""
    assert until_stop("7\nQ: and 8", ("Q:", "\n")) == "7"
    assert until_stop("7 and 8", ("\n",)) == "7 and 8"


def test_a_suite_of_the_interface_before_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(niah, "summarize", lambda *_: [], raising=False)
    with pytest.raises(UserError, match=r"suite niah: .*niah\.py defines `summarize`.* `averages"):
        configure_suites(["niah"], Request(EvaluationConfig(), 4_096))


def test_numbers_of_lm_eval_are_in_the_rows_alone(tmp_path: Path) -> None:
    """They have other scales: from 0 to 1, or perplexities."""
    run = FakeRun(steps=(None, 0)).write(tmp_path / "runs")
    add_results(run, "lm-eval")
    comparison = compare([run])
    assert comparison.suites == ["niah", "longbench"]
    write_report(comparison, tmp_path / "report")
    assert "lm-eval" not in (tmp_path / "report" / "table.md").read_text()
    assert '"lm-eval"' in (tmp_path / "report" / "results.jsonl").read_text()
