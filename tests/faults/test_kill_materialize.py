"""Materializing is killed at random points and run again: the folder must be the same, byte for
byte."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hybrid_folders import files_of, mask_file, plain_folder

PROGRAM = Path(__file__).with_name("materialize_attempts.py")


class Attempts:
    """A model in several files, its mask, and what an undisturbed run makes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = plain_folder(folder / "dense", shard_size="30KB")
        self.largest_file = max(path.stat().st_size for path in model.glob("*.safetensors"))
        mask = mask_file(folder / "mask.json", model)
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, model, mask, folder],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        code, said = self.run("undisturbed", count=True)
        assert code == 0, said
        self.num_operations = int(said.split("operations")[1].split()[0])
        self.expected = self.files("undisturbed")

    def run(self, name: str, **job: Any) -> tuple[int, str]:
        """How a child that was given this job ended, and what it said."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"name": name, **job}) + "\n")
        self.process.stdin.flush()
        said = ""
        for line in self.process.stdout:
            if line.startswith("ended "):
                return int(line.split()[1]), said
            said += line
        raise AssertionError(f"the program of attempts ended: {said}")

    def files(self, name: str) -> dict[str, bytes]:
        return files_of(self.folder / name / "hybrid")

    def moment(self, seed: object) -> int:
        return random.Random(str(seed)).randint(1, self.num_operations)


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempts]:
    running = Attempts(tmp_path_factory.mktemp("attempts"))
    yield running
    running.process.communicate()  # closes its input, and so ends it


@pytest.mark.parametrize(
    "number", [*range(2), *(pytest.param(n, marks=pytest.mark.faults) for n in range(2, 22))]
)
def test_killed_at_a_random_operation_it_resumes_to_the_same_bytes(
    number: int, attempts: Attempts
) -> None:
    name = f"random-{number}"
    code, said = attempts.run(name, kill_at=attempts.moment(number))
    assert code == -signal.SIGKILL, said
    code, said = attempts.run(name)
    assert code == 0, said
    assert attempts.files(name) == attempts.expected


def test_killed_again_and_again_it_still_ends_in_the_same_bytes(attempts: Attempts) -> None:
    codes = [attempts.run("again", kill_at=attempts.moment(f"again {n}"))[0] for n in range(4)]
    assert -signal.SIGKILL in codes
    code, said = attempts.run("again")
    assert code == 0, said
    assert attempts.files("again") == attempts.expected


def test_killed_in_the_middle_of_a_file_it_resumes_to_the_same_bytes(attempts: Attempts) -> None:
    code, said = attempts.run("middle", largest_file=attempts.largest_file - 1000)
    assert code == -signal.SIGXFSZ, said
    code, said = attempts.run("middle")
    assert code == 0, said
    assert attempts.files("middle") == attempts.expected
