"""An evaluation killed at any moment continues after the last prediction, with the same result."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("evaluation_program.py")
KILLED = -signal.SIGKILL
Job = tuple[str, list[float | None]]


def run(folder: Path, jobs: list[Job]) -> list[list[int]]:
    """The exit codes of the jobs, after a first evaluation that is not killed."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps([("whole", [None]), *jobs])],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    codes: list[Any] = json.loads(done.stdout.splitlines()[-1])
    assert codes[0] == [0], done.stderr
    return codes[1:]


def files_of(folder: Path) -> dict[str, bytes]:
    """Those of the suites: the manifest says how long they took."""
    paths = [path for path in folder.glob("evaluation/*/*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


KILLS = [
    pytest.param(range(2), id="2 kills"),
    pytest.param(range(2, 22), id="20 kills", marks=pytest.mark.faults),
]


@pytest.mark.parametrize("attempts", KILLS)
def test_killed_evaluation_ends_in_the_same_files(attempts: range, tmp_path: Path) -> None:
    jobs: list[Job] = []
    for attempt in attempts:
        share = random.Random(attempt).random()
        jobs += [(f"killed-{attempt}", [share]), (f"killed-{attempt}", [None])]
    assert run(tmp_path, jobs) == [[KILLED], [0]] * len(attempts)
    expected = files_of(tmp_path / "whole")
    assert set(expected) == {
        f"evaluation/{suite}/{file}"
        for suite in ("niah", "longbench")
        for file in ("predictions.jsonl", "scores.json")
    }
    for attempt in attempts:
        assert files_of(tmp_path / f"killed-{attempt}") == expected


@pytest.mark.slow
def test_two_ranks_end_in_the_files_of_one_also_when_one_was_killed(tmp_path: Path) -> None:
    codes = run(tmp_path, [("two", [None, 0.25]), ("two", [None, None])])
    assert codes[0][0] not in (0, KILLED)  # rank 0 does not wait for a killed rank
    assert codes[0][1] == KILLED
    assert codes[1] == [0, 0]
    assert files_of(tmp_path / "two") == files_of(tmp_path / "whole")
