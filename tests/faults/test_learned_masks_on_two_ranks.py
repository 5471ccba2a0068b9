"""Two processes learn the gates of one, up to the order of sums."""

from pathlib import Path
from typing import Any

import pytest

from bosch.run.tensorboard import METRICS, read_metrics
from tests.faults.learned_mask_program import launch


def gates_of(row: dict[str, Any]) -> dict[str, float]:
    """The mean gate of each layer after a step."""
    return {name: value for name, value in row.items() if name.startswith("gates/layer")}


@pytest.mark.faults
def test_two_processes_learn_the_same_gates(tmp_path: Path) -> None:
    """The first 10 steps agree within 1e-5: fp32 sums in another order."""
    histories = []
    for world in (1, 2):
        run = tmp_path / f"ranks-{world}"
        attempt = launch(run, world)
        assert attempt.wait() == [0] * world, attempt.output()
        histories.append([gates_of(row) for row in read_metrics(run / "mask" / METRICS)])
    alone, together = histories
    assert max(alone[9].values()) - min(alone[9].values()) > 0.01  # they moved
    for gates, others in zip(alone[:10], together[:10], strict=True):
        assert gates == pytest.approx(others, abs=1e-5)
