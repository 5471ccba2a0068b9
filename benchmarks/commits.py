"""Speed of this checkout beside that of another commit: prefill, decoding, a training step.

Both take turns, a process each, with one thread and CPU time. A value is the median over the rounds
of how many times as fast this checkout is.

    python -m benchmarks commits --other HEAD~10
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks._measure import BenchmarkOptions, Row, speedup
from bosch.run.checkout import ROOT
from bosch.run.progress import track

TITLE = "this checkout beside {other}, one CPU thread"
COLUMNS = {"what": "name", "times as fast": "value:.3f", "each round": "rounds"}


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    other: str = "HEAD"  # commit to compare with
    rounds: int = 5  # how often each side is measured


def measure(options: Options) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        other = Path(name) / "other"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), options.other], check=True)
        try:
            sides = {"before": other, "now": ROOT}
            found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            with track("rounds", options.rounds, "rounds") as bar:
                for _ in range(options.rounds):
                    # In turns, so that a busy machine slows both sides alike.
                    for side, root in sides.items():
                        found[side].append(run_side(root))
                    bar.advance()
        finally:
            # git keeps a list of its worktrees, which a deleted folder would stay in.
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    for what in found["now"][0]:
        before, now = ([each[what] for each in found[side]] for side in ("before", "now"))
        ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(before, now, strict=True))
        yield {"name": what, "value": speedup(before, now), "unit": "times", "rounds": ratios}


def run_side(root: Path) -> dict[str, float]:
    """Seconds of one side; its own warnings and progress bars are left out."""
    program = Path(__file__).with_name("_commits_side.py")
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", str(program)],  # -P: not this folder's modules
        env=environment, cwd=root, check=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
