"""Training killed in a step, a save or an export ends with the same results, bit for bit."""

import itertools
import random
import re
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.training_program import (
    LAST_STEP,
    last_checkpoint,
    launch,
    launch_by_accelerate,
    results,
    run,
)
from tests.plain_training import model_folder, read_weights

OBJECTIVES: dict[str, dict[str, Any]] = {
    "next-token": {},
    "distill": {"settings": {"objective": "distill", "trained": "attention", "layer_weight": 0.5}},
    "stored": {"settings": {"objective": "distill", "stored_shares": 8}},
}
IN_EVERY_RUN = {(2, "next-token", 0), (1, "stored", 0)}
Undisturbed = Callable[..., tuple[dict[str, Any], list[int]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """By number of ranks and objective: results of a run that is not killed, and each rank's file
    operations."""

    @cache
    def made(world: int, objective: str = "next-token") -> tuple[dict[str, Any], list[int]]:
        root = tmp_path_factory.mktemp("undisturbed")
        model_folder(root / "model")
        output = run(root / "train", world, **OBJECTIVES[objective])
        counts = re.findall(r"operations: (\d+)", output)
        return results(root / "train"), [int(count) for count in counts]

    return made


@pytest.mark.parametrize(  # two in every test run, all in `make faults`
    ("world", "objective", "attempt"),
    [
        pytest.param(*case, marks=() if case in IN_EVERY_RUN else pytest.mark.faults)
        for case in itertools.product((1, 2), OBJECTIVES, range(10))
    ],
)
def test_killed_training_resumes_to_the_same_bytes(
    world: int, objective: str, attempt: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    expected, num_operations = undisturbed(world, objective)
    options = OBJECTIVES[objective]
    draw = random.Random(f"{world} {attempt}")
    victim = draw.randrange(world)
    model_folder(tmp_path / "model")
    point = draw.randint(1, num_operations[victim])
    killed = launch(tmp_path / "train", world, at=point, victim=victim, **options)
    assert killed.wait_for_end(victim) == -signal.SIGKILL, killed.output()
    killed.kill()
    run(tmp_path / "train", world, **options)
    assert results(tmp_path / "train") == expected


@pytest.mark.faults
@pytest.mark.parametrize("world", [1, 2])
def test_a_hundred_steps_killed_twice_end_as_undisturbed(world: int, tmp_path: Path) -> None:
    options = {"epochs": 10, "settings": {"max_steps": 100, "checkpoint_steps": 7}}
    whole, killed = tmp_path / "whole" / "train", tmp_path / "killed" / "train"
    for folder in (whole, killed):
        model_folder(folder.parent / "model")
    counts = re.findall(r"operations: (\d+)", run(whole, world, **options))
    for _ in range(2):
        attempt = launch(killed, world, at=int(counts[-1]) // 3, victim=world - 1, **options)
        assert attempt.wait_for_end(world - 1) == -signal.SIGKILL, attempt.output()
        attempt.kill()
        assert 0 < last_checkpoint(killed) < 100
    run(killed, world, **options)
    assert results(killed) == results(whole)
    before, after = (read_weights(each) for each in (whole.parent / "model", whole / "step-000100"))
    sinks = [name for name in before if "_sink_" in name]
    assert len(sinks) == 6  # a key and a value in each of three layers
    for name in sinks:  # every group's, so none is without a gradient
        assert ((after[name] - before[name]).abs().amax(-1) > 1e-3).all(), name


@pytest.mark.faults
def test_the_number_of_ranks_may_change(tmp_path: Path, undisturbed: Undisturbed) -> None:
    model_folder(tmp_path / "model")
    for world in (2, 1):
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / "STOP").touch()
        assert "ended: a STOP file" in run(tmp_path / "train", world)
    output = run(tmp_path / "train", 2)
    assert "ranks: 1 -> 2" in output
    assert "training resumes after step 2 of 6" in output
    # Every step's loss, gradient norm etc. are as if there had always been two ranks.
    ours, expected = (each["curve"] for each in (results(tmp_path / "train"), undisturbed(2)[0]))
    for row, other in zip(ours, expected, strict=True):
        assert [value is None for value in row] == [value is None for value in other]
        numbers, others = ([v for v in values if v is not None] for values in (row, other))
        assert numbers == pytest.approx(others, rel=1e-6)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_a_signal_to_a_rank_ends_all(world: int, tmp_path: Path, undisturbed: Undisturbed) -> None:
    expected, num_operations = undisturbed(world)
    model_folder(tmp_path / "model")
    point, victim = num_operations[-1] // 2, world - 1
    output = run(tmp_path / "train", world, at=point, sends="SIGTERM", victim=victim)
    assert output.count("ended: SIGTERM") == world
    done = results(tmp_path / "train")["curve"][-1][0]
    assert done < LAST_STEP
    assert last_checkpoint(tmp_path / "train") == done
    assert f"training resumes after step {done} of 6" in run(tmp_path / "train", world)
    assert results(tmp_path / "train") == expected


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_rank_ends_the_other(victim: int, tmp_path: Path, undisturbed: Undisturbed) -> None:
    point = undisturbed(2)[1][victim] // 2
    model_folder(tmp_path / "model")
    killed = launch(tmp_path / "train", 2, at=point, victim=victim)
    codes = killed.wait()  # not -9: `wait` did not have to kill it
    assert codes[victim] == -signal.SIGKILL, killed.output()
    assert codes[1 - victim] not in (0, -signal.SIGKILL), killed.output()


def test_a_bug_on_one_rank_keeps_its_traceback_and_ends_the_other(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    attempt = launch(tmp_path / "train", 2, victim=1, bug_at=3)
    assert attempt.wait() == [1, 1], attempt.output()
    log = attempt.logs[1].read_text()
    assert "Traceback" in log
    assert "KeyError: 'planted bug'" in log


@pytest.mark.faults
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("arguments", [[], ["--use_fsdp", "--num_processes", "2"]])
def test_the_end_of_the_launcher_ends_the_ranks_with_everything_saved(
    arguments: list[str], name: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    world = 2 if arguments else 1
    expected, num_operations = undisturbed(world)
    model_folder(tmp_path / "model")
    folder = tmp_path / "train"
    point = num_operations[0] // 3
    code, output = launch_by_accelerate(folder, arguments, at=point, sends=name, to="parent")
    assert code != 0
    assert output.count("ended: SIGTERM") == world, output
    done = results(folder)["curve"][-1][0]
    assert done < LAST_STEP
    assert last_checkpoint(folder) == done
    code, output = launch_by_accelerate(folder, arguments)
    assert code == 0, output
    assert f"training resumes after step {done} of 6" in output
    assert results(folder) == expected


@pytest.mark.slow
def test_two_nodes_with_the_whole_state_each_train_as_one_line_of_ranks(tmp_path: Path) -> None:
    """Up to the order of sums. Killed, they resume to the same bytes, and as two ranks to the same
    weights: no row is in a checkpoint twice."""
    model_folder(tmp_path / "model")
    sizes: dict[str, Any] = {"batch_sequences": 8, "activation_checkpointing": "attention"}
    line: dict[str, Any] = {"epochs": 2, "settings": sizes}
    nodes = {**line, "node_ranks": 2, "settings": {**sizes, "shard_within_node": True}}
    run(tmp_path / "line", 4, **line)
    output = run(tmp_path / "nodes", 4, **nodes)
    assert "shard within node" in output
    at = int(re.findall(r"operations: (\d+)", output)[3]) // 2
    assert launch(tmp_path / "killed", 4, at=at, victim=3, **nodes).wait()[3] == -signal.SIGKILL
    assert 0 < last_checkpoint(tmp_path / "killed") < LAST_STEP
    shutil.copytree(tmp_path / "killed", tmp_path / "fewer")
    run(tmp_path / "killed", 4, **nodes)
    run(tmp_path / "fewer", 2, **line)
    found = [results(tmp_path / name) for name in ("line", "nodes", "killed", "fewer")]
    assert found[1] == found[2]
    curves = [torch.tensor([row[1:4] for row in one["curve"] if row[0]]) for one in found]
    weights = [read_weights(tmp_path / name / "step-000006") for name in ("line", "nodes", "fewer")]
    for curve in curves[1:]:
        torch.testing.assert_close(curve, curves[0], rtol=1e-5, atol=0)
    for other in weights[1:]:
        for name, weight in weights[0].items():
            assert torch.linalg.norm(other[name] - weight) <= 1e-5 * torch.linalg.norm(weight), name
