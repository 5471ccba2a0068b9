"""Speed of this checkout beside that of another commit: prefill, decoding, a training step.

Each side is a process with one thread, and what is measured is CPU time. The two take turns at
every single measurement, seconds apart: a machine whose clock or neighbors change within a minute
slows both. A value is the median over the rounds of how many times as fast this checkout is, with
the middle half of the rounds beside it.

    python -m benchmarks commits --other HEAD~10
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks._measure import BenchmarkOptions, Row, speedup
from bosch.run.checkout import ROOT
from bosch.run.errors import UserError
from bosch.run.progress import track

PROGRAM = Path(__file__).with_name("_commits_side.py")
TITLE = "this checkout beside {other}, one CPU thread"
COLUMNS = {"what": "name", "times as fast": "value:.3f", "half of the rounds": "half"}


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    other: str = "HEAD"  # commit to compare with
    rounds: int = 15  # how often each side is measured

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise UserError(f"--rounds {self.rounds}: two at least, as a value is their middle")


def measure(options: Options) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        other = Path(name) / "other"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), options.other], check=True)
        try:
            with ExitStack() as stack:
                before, now = (stack.enter_context(Side(root)) for root in (other, ROOT))
                yield from compare(before, now, options.rounds)
        finally:
            # git keeps a list of its worktrees, which a deleted folder would stay in.
            subprocess.run([*git, "remove", "--force", str(other)], check=True)


def compare(before: "Side", now: "Side", rounds: int) -> Iterator[Row]:
    found: dict[str, list[tuple[float, float]]] = {}
    with track("rounds", rounds, "rounds") as bar:
        for number in range(rounds):
            for what in before.names:
                # Who comes second finds warmer caches, so they change places.
                order = (before, now) if number % 2 == 0 else (now, before)
                seconds = {side: side.seconds_of(what) for side in order}
                found.setdefault(what, []).append((seconds[before], seconds[now]))
            bar.advance()
    for what, pairs in found.items():
        lower, _, upper = quantiles([old / new for old, new in pairs], n=4)
        yield {
            "name": what, "value": speedup(*zip(*pairs, strict=True)), "unit": "times",
            "half": f"{lower:.2f} to {upper:.2f}", "seconds": pairs,
        }  # fmt: skip


class Side:
    """A process with the code of one checkout, which measures what it is asked for; its own
    warnings and progress bars are left out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],  # -P: not this folder's modules
            env=environment, cwd=root, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.names: list[str] = self.read()

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def seconds_of(self, what: str) -> float:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        return float(self.read())

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            problem = f"the side of {self.root} ended by itself"
            raise UserError(f"{problem}. {PROGRAM} with PYTHONPATH={self.root} says why.")
        return json.loads(line)
