"""The searches on the embedded model, through the recipe: their masks meet the ratio exactly, and
do not depend on kills, ranks or accelerations. Takes minutes."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hybrid_folders import run_recipe

pytestmark = pytest.mark.slow

SEARCH = Path(__file__).parents[2] / "recipes" / "search_mask.py"
NONE = [f"--accelerations.no-{name}" for name in ("prefixes", "answer-rows", "memo", "early-end")]
# recipes/search_mask.py, which kills itself after so many evaluations.
KILLED = """
import os, signal, sys
from bosch.search.outcomes import Outcomes
from bosch.recipes import search_mask

add, left = Outcomes.add, int(sys.argv[1])

def add_or_die(self, *arguments, **more):
    global left
    add(self, *arguments, **more)
    left -= self._path.parent.name == "mask"
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

Outcomes.add = add_or_die
search_mask.main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions") / "calibration"
    words = ("--length", 512, "--examples", 8, "--questions-per-context", 4, "--out", folder)
    done = run_recipe("calibrate.py", *words)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(params=["bosch_paper", "bosch"])
def words(request: pytest.FixtureRequest, calibration: Path) -> list[str]:
    method = ["--method", request.param, "--ratio", "0.75", "--seed", "3"]
    return [*method, "--calibration", str(calibration), "--kappa", "6"]


def search(folder: Path, words: list[str], *launcher: str) -> dict[str, Any]:
    """The mask and its record, from a run in its own folder, out of reach of any memo."""
    command = [*(launcher or [sys.executable]), str(SEARCH), *words]
    command += ["--run-dir", str(folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads((folder / "run" / "mask" / "mask.json").read_text())
    return {name: content[name] for name in ("z", "score_trace")}


def test_accelerations_and_ranks_change_no_mask(words: list[str], tmp_path: Path) -> None:
    plain = search(tmp_path / "plain", [*words, *NONE])
    assert search(tmp_path / "fast", words) == plain
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    two = (accelerate, "launch", "--num_processes", "2", "--main_process_port", "0")
    assert search(tmp_path / "two", words, *two, "--cpu")["z"] == plain["z"]


def test_killed_at_twenty_evaluations_it_ends_the_same(words: list[str], tmp_path: Path) -> None:
    undisturbed = search(tmp_path / "undisturbed", words)
    outcomes = tmp_path / "undisturbed" / "run" / "mask" / "outcomes.jsonl"
    count = len(outcomes.read_text().splitlines())
    command = [*words, "--run-dir", str(tmp_path / "killed" / "run")]
    done = 0
    for last in sorted(random.Random(0).sample(range(1, count + 1), 20)):
        left, done = last - done, last
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, str(left), *command],
            cwd=SEARCH.parents[1],
            capture_output=True,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert search(tmp_path / "killed", words) == undisturbed
