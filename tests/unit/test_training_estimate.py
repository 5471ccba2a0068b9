"""Estimated memory and time of training, against figures obtained in other ways."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import estimate
from benchmarks.__main__ import run_benchmark
from bosch.run.errors import UserError


def figures(model: str, **options: object) -> dict[str, Any]:
    return estimate.estimate_training(model, estimate.Options(**options))  # type: ignore[arg-type]


# Peaks of one training step simulated with fake tensors under fully_shard (FSDPMemTracker), torch
# 2.13, Adam's moments added: GPUs, micro-batch, GB.
SIMULATED = {
    "Qwen3-1.7B": [(8, 1, 17), (8, 4, 52), (16, 1, 15), (1, 2, 53), (1, 4, 77)],
    "Qwen3-8B": [(8, 1, 44), (16, 1, 36), (1, 1, 158)],
    "Qwen3-14B": [(8, 1, 66), (16, 1, 51)],
}


@pytest.mark.parametrize("model", SIMULATED)
def test_memory_is_near_the_simulated_peak(model: str) -> None:
    for gpus, micro, gigabytes in SIMULATED[model]:
        estimated = figures(model, gpus=gpus, micro_batch_sequences=micro)["value"]
        assert estimated == pytest.approx(gigabytes, rel=0.08)


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
    assert estimated["hours"] == pytest.approx(hours, rel=0.02)
    assert estimated["checkpoint_gb"] == pytest.approx(checkpoint, rel=0.02)
    assert estimated["export_gb"] == pytest.approx(export, rel=0.02)
    assert estimated["step_seconds"] < estimated["dense_step_seconds"]


def test_the_command_says_what_does_not_fit_and_that_it_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "Qwen3-1.7B", "Qwen3-30B-A3B", "--gpus", "8"]
    run_benchmark("estimate", [*arguments, "--out", str(tmp_path / "estimate.json")])
    table = capsys.readouterr().out
    assert "computed, not measured" in table
    small, large = (line for line in table.splitlines() if "Qwen3" in line)
    assert "yes" in small
    assert "NO" in large
    rows = json.loads((tmp_path / "estimate.json").read_text())["rows"]
    assert all(row["name"].startswith("computed: ") for row in rows)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpus": 16, "micro_batch_sequences": 8}, "--batch-sequences 64 .* 16 GPUs x 8 "),
        ({"gpu": "H201"}, "--gpu H201: .*'H200'"),
        ({"mfu": 0.0}, "--mfu"),
    ],
)
def test_options_that_cannot_be_computed_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        estimate.Options(**options)
