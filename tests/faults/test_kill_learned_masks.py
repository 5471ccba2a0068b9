"""A learned mask is the same after kills at random moments, and two processes learn the same gates
up to the order of sums."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bosch.masks.mask import read_mask
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


def kill_and_compare(whole: tuple[Path, int], run: Path, moments: Iterator[int]) -> None:
    """Each attempt but the last is killed at one moment."""
    expected, operations = whole
    codes = []
    for moment in moments:
        attempt = launch(run, at=moment % operations + 1)
        codes += attempt.wait()
        assert codes[-1] in (-9, 0), attempt.output()
        if codes[-1] == 0:  # the rest took fewer operations
            break
    assert codes[0] == -9
    attempt = launch(run)
    assert attempt.wait() == [0], attempt.output()
    for name in FILES:
        assert (run / "mask" / name).read_bytes() == (expected / "mask" / name).read_bytes(), name
    assert not (run / "mask" / "checkpoints").exists()


@pytest.mark.slow
def test_killed_twice_it_is_the_same_mask(whole: tuple[Path, int], tmp_path: Path) -> None:
    draw = random.Random(0)
    moments = [draw.randrange(whole[1] // 4, whole[1] * 3 // 4) for _ in range(2)]
    kill_and_compare(whole, tmp_path / "run", iter(moments))


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_any_moment_it_is_the_same_mask(
    whole: tuple[Path, int], tmp_path: Path, seed: int
) -> None:
    moment = random.Random(seed).randrange(whole[1])
    kill_and_compare(whole, tmp_path / "run", iter([moment]))


def gates_of(row: dict[str, Any]) -> dict[str, float]:
    """The mean gate of each layer after a step."""
    return {name: value for name, value in row.items() if name.startswith("gates/layer")}


@pytest.mark.faults
def test_two_processes_learn_the_same_gates(tmp_path: Path) -> None:
    """The first 10 steps agree within 1e-5: fp32 sums in another order."""
    histories, masks = [], []
    for world in (1, 2):
        run = tmp_path / f"ranks-{world}"
        attempt = launch(run, world, batch_sequences=2)
        assert attempt.wait() == [0] * world, attempt.output()
        histories.append([gates_of(row) for row in read_metrics(run / "mask" / METRICS)])
        masks.append(read_mask(run / "mask" / "mask.json").mask)
    alone, together = histories
    assert max(alone[9].values()) - min(alone[9].values()) > 0.01  # they moved
    for gates, others in zip(alone[:10], together[:10], strict=True):
        assert gates == pytest.approx(others, abs=1e-5)
    assignment = [itertools.chain(*mask.z) for mask in masks]
    alike = sum(bit == other for bit, other in zip(*assignment, strict=True))
    print(f"{alike} of {masks[0].num_total} groups are alike in the masks of 1 and 2 processes")
