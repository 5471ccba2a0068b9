"""Estimated time of training, against figures obtained in other ways."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import estimate
from benchmarks.__main__ import run_benchmark
from bosch.run.errors import UserError


def figures(model: str, **options: object) -> dict[str, Any]:
    return estimate.estimate_training(model, estimate.Options(**options))  # type: ignore[arg-type]


# Worked out from the formula by hand: hours of 2.5B tokens at ratio .75 on 16 A800 at 40 % of
# their peak, GB of a checkpoint and of an export.
@pytest.mark.parametrize(
    ("model", "hours", "checkpoint", "export"),
    [
        ("Qwen3-1.7B", 4.8, 21, 3.4),
        ("Qwen3-8B", 18.8, 98, 16.4),
        ("Qwen3-14B", 33, 177, 29.5),
        ("Qwen3-30B-A3B", 10.3, 366, 61),
    ],
)
def test_time_and_files_of_the_papers_four_sizes(
    model: str, hours: float, checkpoint: float, export: float
) -> None:
    estimated = figures(model, gpus=16)
    assert estimated["value"] == pytest.approx(hours, rel=0.02)
    assert estimated["checkpoint_gb"] == pytest.approx(checkpoint, rel=0.02)
    assert estimated["export_gb"] == pytest.approx(export, rel=0.02)
    assert estimated["step_seconds"] < estimated["dense_step_seconds"]


def test_the_command_says_that_it_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_benchmark("estimate", ["--gpus", "8", "--out", str(tmp_path / "estimate.json")])
    assert "computed, not measured" in capsys.readouterr().out
    rows = json.loads((tmp_path / "estimate.json").read_text())["rows"]
    assert all(row["name"].startswith("computed: ") for row in rows)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpus": 0}, "--gpus"),
        ({"gpu": "H201"}, "--gpu H201: .*'H200'"),
        ({"mfu": 0.0}, "--mfu"),
    ],
)
def test_options_that_cannot_be_computed_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        estimate.Options(**options)
