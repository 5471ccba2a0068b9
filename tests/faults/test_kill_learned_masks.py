"""A learned mask is the same after kills at random moments, and two processes learn the same gates
up to the order of sums."""

import random
from pathlib import Path
from typing import Any

import pytest

from bosch.methods._gates import LEARNED
from bosch.run.tensorboard import METRICS, read_metrics
from tests.faults.learned_mask_program import launch

FILES = ("mask.json", "scores.json", LEARNED)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run that is not killed, and its number of file operations."""
    run = tmp_path_factory.mktemp("whole") / "run"
    attempt = launch(run)
    assert attempt.wait() == [0], attempt.output()
    return run, int(attempt.output().rsplit("operations: ", 1)[1])


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_any_moment_it_is_the_same_mask(
    whole: tuple[Path, int], tmp_path: Path, seed: int
) -> None:
    (expected, operations), run = whole, tmp_path / "run"
    attempt = launch(run, at=random.Random(seed).randrange(operations) + 1)
    assert attempt.wait() == [-9], attempt.output()
    attempt = launch(run)
    assert attempt.wait() == [0], attempt.output()
    for name in FILES:
        assert (run / "mask" / name).read_bytes() == (expected / "mask" / name).read_bytes(), name
    assert not (run / "mask" / "checkpoints").exists()


def gates_of(row: dict[str, Any]) -> dict[str, float]:
    """The mean gate of each layer after a step."""
    return {name: value for name, value in row.items() if name.startswith("gates/layer")}


@pytest.mark.faults
def test_two_processes_learn_the_same_gates(tmp_path: Path) -> None:
    """The first 10 steps agree within 1e-5: fp32 sums in another order."""
    histories = []
    for world in (1, 2):
        run = tmp_path / f"ranks-{world}"
        attempt = launch(run, world, batch_sequences=2)
        assert attempt.wait() == [0] * world, attempt.output()
        histories.append([gates_of(row) for row in read_metrics(run / "mask" / METRICS)])
    alone, together = histories
    assert max(alone[9].values()) - min(alone[9].values()) > 0.01  # they moved
    for gates, others in zip(alone[:10], together[:10], strict=True):
        assert gates == pytest.approx(others, abs=1e-5)
