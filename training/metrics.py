"""metrics.jsonl: what a run did, a line a step, and the truth behind every curve.

Each line is forced to the disk before the next step. TensorBoard files are made from it, and made
anew whenever a run goes on, so that no point is there twice and none is missing.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bosch.run.errors import UserError
from bosch.run.manifest import write_atomically
from bosch.run.progress import say
from bosch.run.tensorboard import METRICS, TrainingCurves, read_metrics


class MetricsLog:
    """The log in a training stage's folder; rank 0 writes it, for the others every call is
    nothing."""

    def __init__(
        self, folder: Path, rank: int, curves: str = "train", run_folder: Path | None = None
    ) -> None:
        """curves: what they are called in TensorBoard, in `tb` of run_folder (None: the parent)."""
        self.path, self._name = folder / METRICS, curves
        self._run = run_folder or folder.parent
        self._writes = rank == 0
        self._curves: TrainingCurves | None = None

    def start(self, step: int) -> None:
        """The next rows begin at `step`: drop those of an attempt that had come further."""
        if not self._writes:
            return
        rows = read_metrics(self.path) if self.path.is_file() else []
        kept = [row for row in rows if row["step"] < step]
        if len(kept) < len(rows):
            say(f"metrics: dropped {len(rows) - len(kept)} rows that are made again")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(self.path, "".join(map(_line, kept)))
        except OSError as error:
            raise self._explained(error) from error
        self._curves = TrainingCurves(self._run, kept, self._name)

    def write(self, row: Mapping[str, Any]) -> None:
        """A row has `step` and `tokens`, and figures; its time is added."""
        if not self._writes:
            return
        assert self._curves is not None, "start comes first"
        timed = {**row, "time": round(time.time(), 3)}
        try:
            with self.path.open("a") as file:
                file.write(_line(timed))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._explained(error) from error
        self._curves.add(timed)

    def _explained(self, error: OSError) -> UserError:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        return UserError(
            f"{self.path} cannot be written: {reason}. The last checkpoint is whole; make room (or "
            "mend what is wrong) and run the same command again."
        )


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"
