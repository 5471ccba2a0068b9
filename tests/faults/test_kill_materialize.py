"""Materializing, killed at random points and run again, gives the same folder byte for byte."""

import random
import resource
import signal
from pathlib import Path

import pytest
import torch

from bosch.recipes.materialize_model import main as materialize_model
from tests.fork_server import PATIENCE, start
from tests.hybrid_folders import files_of, mask_file, plain_folder
from tests.kill_points import watch_operations


def attempt(folder: Path, name: str, kill_at: int | None, largest_file: int | None) -> None:
    """Run in a separate process. It gets SIGKILL before the n-th file operation in the target
    folder, or is ended by the kernel when a file grows beyond this size in bytes."""
    torch.set_num_threads(1)
    out = folder / name / "hybrid"
    if largest_file is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it and raises an OSError
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seen = watch_operations(out, at=kill_at)
    model, mask = folder / "dense", folder / "mask.json"
    materialize_model(["--model", str(model), "--mask", str(mask), "--out", str(out)])
    (folder / name / "operations").write_text(str(seen[0]))


class Attempts:
    """A model in several files, its mask, and the result of an undisturbed run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = plain_folder(folder / "dense", shard_size="30KB")
        self.largest_file = max(path.stat().st_size for path in model.glob("*.safetensors"))
        mask_file(folder / "mask.json", model)
        assert self.run("undisturbed") == 0
        self.num_operations = int((folder / "undisturbed" / "operations").read_text())

    def run(
        self, name: str, kill_at: int | None = None, largest_file: int | None = None
    ) -> int | None:
        """The exit code of an attempt."""
        process = start(attempt, self.folder, name, kill_at, largest_file)
        process.join(PATIENCE)
        return process.exitcode

    def moment(self, seed: object) -> int:
        return random.Random(str(seed)).randint(1, self.num_operations)

    def check_resumed(self, name: str) -> None:
        """Run once more and compare with the undisturbed run."""
        assert self.run(name) == 0
        expected = files_of(self.folder / "undisturbed" / "hybrid")
        assert files_of(self.folder / name / "hybrid") == expected


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> Attempts:
    return Attempts(tmp_path_factory.mktemp("attempts"))


@pytest.mark.parametrize(
    "number", [*range(2), *(pytest.param(n, marks=pytest.mark.faults) for n in range(2, 22))]
)
def test_killed_at_a_random_operation_it_resumes_to_the_same_bytes(
    number: int, attempts: Attempts
) -> None:
    assert attempts.run(f"random-{number}", attempts.moment(number)) == -signal.SIGKILL
    attempts.check_resumed(f"random-{number}")


def test_killed_again_and_again_it_still_ends_in_the_same_bytes(attempts: Attempts) -> None:
    codes = [attempts.run("again", attempts.moment(f"again {n}")) for n in range(4)]
    assert -signal.SIGKILL in codes
    attempts.check_resumed("again")


def test_killed_in_the_middle_of_a_file_it_resumes_to_the_same_bytes(attempts: Attempts) -> None:
    code = attempts.run("middle", largest_file=attempts.largest_file - 1000)
    assert code == -signal.SIGXFSZ
    attempts.check_resumed("middle")
