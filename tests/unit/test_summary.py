"""eval/report/summary.py: the summary of one run on the terminal."""

import re
from pathlib import Path

import pytest

from bosch.eval.report.compare import compare
from bosch.eval.report.summary import answers, describe_recovery, summarize
from bosch.eval.report.tables import short_table
from tests.run_folders import FakeRun


def test_the_answers_begin_with_the_best_run(tmp_path: Path) -> None:
    """A line on the mask, then one per suite."""
    dense = FakeRun("fisher", steps=(None,)).write(tmp_path)
    start = FakeRun("razor", steps=(None, 0)).write(tmp_path)
    trained = FakeRun().write(tmp_path)
    found = dict(answers(compare([dense, start, trained])))
    assert [*found] == [trained.name, start.name, dense.name]
    mask, niah, longbench = found[trained.name]
    assert mask.startswith("bosch, 12 of 16 KV groups on a window of 64 tokens")
    assert mask.endswith("KV bytes saved: 70% at 1,024 tokens")
    assert (niah, longbench) == tuple(map(describe_recovery, compare([trained]).recoveries))
    assert re.fullmatch(
        r"NIAH: -\S+ \[.+\] points from the dense model \(89.6\) before training",
        found[start.name][1],
    )
    assert len(found[dense.name]) == 1  # nothing but its mask


@pytest.mark.parametrize(
    ("dense", "verdict"), [(0.6, "no gap to recover"), (0.65, "no significant gap to the dense")]
)
def test_there_is_no_share_of_a_gap_that_may_not_exist(
    tmp_path: Path, dense: float, verdict: str
) -> None:
    run = FakeRun(skill=lambda step, task: dense if step is None else 0.6).write(tmp_path)
    lines = [str(line) for line in summarize(compare([run]))]
    assert not any("% [" in line for line in lines if "gap" in line)
    assert any(verdict in line for line in lines)
    assert "no significant gap" in str(short_table(compare([run])).rows)
