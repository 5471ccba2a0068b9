"""The chain of the preset smoke, ended by a signal anywhere and started again, a hundred times."""

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from bosch.run.fingerprint import fingerprint, hash_file
from bosch.training.guards import ENDS
from tests.fuzz.fuzz_chain import code_fingerprint
from tests.sampled import sampled
from tests.smoke_chain import RUN, STAGES, results, start

IN_CI, KEPT = range(4), range(4, 100)
SIGNALS = ("SIGKILL", "SIGTERM")
HELPERS = ("smoke_chain", "kill_points", "fork_server")
FEWEST = 200  # a run that finds everything complete makes 218 operations


@pytest.mark.parametrize(
    "attempt",
    [*sampled(IN_CI, slice(2, 3)), *(pytest.param(n, marks=pytest.mark.faults) for n in KEPT)],
)
def test_no_kill_changes_a_result(
    attempt: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By SIGKILL and SIGTERM in turn, at random points of each stage in turn. Every third run is
    ended again while it resumes. Those in CI draw no pictures."""
    if attempt in KEPT and attempt in passed_before():
        pytest.skip(f"passed before, with this code: {rows_file()}")
    draws = attempt in KEPT
    folder, operations = request.getfixturevalue("drawn" if draws else "undisturbed")
    assert set(operations) == set(STAGES)
    began, draw, work = time.monotonic(), random.Random(attempt), tmp_path / "work"
    work.mkdir()
    sends, stage = SIGNALS[attempt % 2], STAGES[attempt // 2 % len(STAGES)]
    point = draw.choice(operations[stage])
    ended = [end(work, point, sends, draws)]
    if attempt % 3 == 2:
        left = max(map(max, operations.values())) - point
        again = draw.randint(1, max(left, FEWEST) if ended[0] == sends else FEWEST)
        ended.append(end(work, again, draw.choice(SIGNALS), draws))
    code, output = start(work, draws=draws)
    assert code == 0, output
    assert results(work / RUN) == results(folder / RUN)
    assert shown(work / RUN) == shown(folder / RUN)
    row = {"attempt": attempt, "stage": stage, "ended": ended, "seconds": time.monotonic() - began}
    note_passed(row)
    shutil.rmtree(work)


def end(folder: Path, at: int, sends: str, draws: bool) -> str:
    """The signal that ended a run, or that training ended after its step, as SIGTERM asks."""
    code, output = start(folder, at, sends, draws=draws)
    if code == 0 and sends == "SIGTERM" and f"SIGTERM: {ENDS}" in output:
        return "after its step" if "stopped by SIGTERM, and saved" in output else "at its end"
    assert code == -signal.Signals[sends], output
    return sends


def shown(run: Path) -> dict[str, bytes]:
    """Pictures, and the report's table without the row that says what the work cost."""
    table = (run / "report" / "table.md").read_bytes()
    pictures = {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*.png")}
    return pictures | {"table.md": re.sub(rb".*\d s \|.*", b"", table)}


def rows_file() -> Path:
    """A line for each attempt that passed, so that `make faults` goes on where it was."""
    # Of this code, these tests and these versions of the libraries.
    tests = [Path(__file__), *(Path(__file__).parents[1] / f"{name}.py" for name in HELPERS)]
    code = fingerprint([code_fingerprint(), *map(hash_file, tests)])
    return Path(__file__).parents[2] / "runs" / "kills" / f"{code}.jsonl"


def passed_before() -> set[int]:
    lines = rows_file().read_text().splitlines() if rows_file().exists() else []
    return {json.loads(line)["attempt"] for line in lines}


def note_passed(row: dict[str, object]) -> None:
    """Only of those that take long."""
    if row["attempt"] in KEPT:
        rows_file().parent.mkdir(parents=True, exist_ok=True)
        with rows_file().open("a") as file:
            file.write(json.dumps(row) + "\n")
