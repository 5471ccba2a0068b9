"""eval/report/summary.py: the story of one run, as the terminal shows it."""

from pathlib import Path

from bosch.eval.report.compare import compare
from bosch.eval.report.summary import summarize
from bosch.eval.report.tables import short_table
from tests.run_folders import FakeRun


def test_the_story_has_mask_costs_and_every_checkpoint(tmp_path: Path) -> None:
    lines = [str(line) for line in summarize(compare([FakeRun().write(tmp_path)]))]
    assert lines[0].startswith("mask: bosch, ratio 0.75 (12/16), window 64")
    assert [line[:8] for line in lines[1:5]] == [f"layer {layer} " for layer in (3, 2, 1, 0)]
    assert sum(line.count("::") for line in lines[1:5]) == 12
    assert lines[5] == "KV bytes saved: 70% at 1,024 tokens"
    assert lines[6] == "S, calibration examples answered right (dense): 0.50 (0.98)"
    assert [line.split("  ")[0] for line in lines[8:12]] == [
        *("dense model", "step 0", "step 100", "step 200")
    ]
    assert "2.6000" in lines[10]  # the validation loss of step 100
    assert lines[12].startswith("NIAH: gap to the dense model closed")


def test_a_run_that_has_only_begun_tells_what_it_has(tmp_path: Path) -> None:
    lines = [str(line) for line in summarize(compare([FakeRun(steps=(None,)).write(tmp_path)]))]
    assert lines[-1].startswith("dense model")


def test_no_share_is_told_of_a_gap_that_may_not_be_there(tmp_path: Path) -> None:
    run = FakeRun(skill=lambda step, task: 0.6).write(tmp_path)
    lines = [str(line) for line in summarize(compare([run]))]
    assert not any("[" in line for line in lines if "gap" in line)
    assert any("no gap to close" in line or line.endswith("–") for line in lines if "gap" in line)
    assert "no clear gap" in str(short_table(compare([run])).rows)
