"""Materializing, killed at random points and run again, gives the same folder byte for byte."""

import random
import signal
from pathlib import Path

import pytest
import torch

from bosch.recipes.materialize_model import main as materialize_model
from tests.fork_server import PATIENCE, start
from tests.hybrid_folders import files_of, mask_file, plain_folder
from tests.kill_points import watch_operations


def materialize(folder: Path, name: str, kill_at: int | None) -> None:
    """Run in a separate process. It gets SIGKILL before the n-th file operation in the target
    folder."""
    torch.set_num_threads(1)
    out = folder / name / "hybrid"
    seen = watch_operations(out, at=kill_at)
    model, mask = folder / "dense", folder / "mask.json"
    materialize_model(["--model", str(model), "--mask", str(mask), "--out", str(out)])
    (folder / name / "operations").write_text(str(seen[0]))


def run(folder: Path, name: str, kill_at: int | None = None) -> int | None:
    process = start(materialize, folder, name, kill_at)
    process.join(PATIENCE)
    return process.exitcode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model in several files, its mask, and the result of an undisturbed run."""
    folder = tmp_path_factory.mktemp("attempts")
    model = plain_folder(folder / "dense", shard_size="30KB")
    mask_file(folder / "mask.json", model)
    assert run(folder, "undisturbed") == 0
    return folder


@pytest.mark.parametrize(
    "number", [*range(2), *(pytest.param(n, marks=pytest.mark.faults) for n in range(2, 22))]
)
def test_killed_anywhere_it_resumes_to_the_same_bytes(number: int, folder: Path) -> None:
    name, num_operations = f"random-{number}", (folder / "undisturbed" / "operations").read_text()
    kill_at = random.Random(number).randint(1, int(num_operations))
    assert run(folder, name, kill_at) == -signal.SIGKILL
    assert run(folder, name) == 0
    assert files_of(folder / name / "hybrid") == files_of(folder / "undisturbed" / "hybrid")
