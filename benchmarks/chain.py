"""Run recover.py with the preset smoke: kill it in the training, and run it again to its end.

The steps that both attempts made must have the same losses. Rows: the seconds of each stage, and
the evaluations' mean scores.
"""

import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._measure import BenchmarkOptions, Row
from bosch.eval.rows import read_rows
from bosch.run.files import MANIFEST

COLUMNS = {"what": "name", "value": "value:.4g", "unit": "unit"}
KILLED_AT = 5  # steps
PATIENCE_SECONDS = 400.0


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    title: str = "recover.py --preset smoke, killed once"


GPU_OPTIONS = CPU_OPTIONS = Options()


def measure(options: Options) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "bosch.recipes.recover", "--preset", "smoke"]
        command += ["--run-dir", str(run), "--data.tokens", "16384", "--train.checkpoint-steps"]
        command += ["2", "--eval.suites", "niah"]
        before = kill_in_training(command, run)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = losses_of(run)
        if list(after) != list(range(len(after))) or len(after) <= len(before):
            raise RuntimeError(f"the resumed training has the steps {list(after)}")
        for step, loss in before.items():
            if not math.isclose(loss, after[step], rel_tol=1e-3):
                raise RuntimeError(f"step {step} has the loss {loss}, and resumed {after[step]}")
        name = "steps of the killed training, with the losses of the resumed one"
        yield {"name": name, "value": len(before) - 1, "unit": "steps"}
        for path in sorted(Path(folder).rglob(MANIFEST)):
            if seconds := json.loads(path.read_text()).get("wall_seconds"):
                stage = path.parent.relative_to(folder).as_posix()
                yield {"name": f"stage {stage}", "value": sum(seconds), "unit": "s"}
        for row in read_rows(run / "eval" / "results.jsonl"):
            if row["task"] == "average":
                step = "dense" if row["step"] is None else f"step {row['step']}"
                yield {"name": f"{row['suite']}, {step}", "value": row["value"], "unit": "%"}


def kill_in_training(command: list[str], run: Path) -> dict[int, float]:
    """The losses of the steps that it made before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while len(losses := losses_of(run)) <= KILLED_AT:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"recover.py was not in step {KILLED_AT} before it ended")
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    return losses


def losses_of(run: Path) -> dict[int, Any]:
    path = run / "train" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row.get("loss", 0.0) for row in rows}
