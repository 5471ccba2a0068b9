"""metrics.jsonl: what a run did, a line a step, and the truth behind every curve; and the meter of
a step's time and speed.

Each line is forced to the disk before the next step. TensorBoard files are made from it, and made
anew whenever a run goes on, so that no point is there twice and none is missing.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bosch.data.loader import Batch
from bosch.run.errors import UserError
from bosch.run.lines import append_line
from bosch.run.manifest import write_atomically
from bosch.run.progress import say
from bosch.run.tensorboard import METRICS, TrainingCurves, read_metrics
from bosch.training.flops import count_active_weights, peak_flops, training_flops
from bosch.training.parallel import World
from bosch.training.schedule import TrainSchedule


class MetricsLog:
    """The log in a training stage's folder; only rank 0 writes."""

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
        with self._explaining():
            write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self._curves = TrainingCurves(self._run, kept, self._name)

    def write(self, row: Mapping[str, Any]) -> None:
        """A row has `step` and `tokens`, and figures; its time is added."""
        if not self._writes:
            return
        assert self._curves is not None, "start comes first"
        timed = {**row, "time": round(time.time(), 3)}
        with self._explaining(), self.path.open("ab") as file:
            append_line(file, timed)
        self._curves.add(timed)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            raise UserError(
                f"{self.path} cannot be written: {reason}. The last checkpoint is whole; make room "
                "(or mend what is wrong) and run the same command again."
            ) from error


class Meter:
    """Laps of a step: waiting for data, computing, and checkpoints with their evaluations."""

    def __init__(self, model: Any, schedule: TrainSchedule, world: World) -> None:
        self.schedule, self.world, self.config = schedule, world, model.config
        self.num_weights = count_active_weights(model)
        self.peak = peak_flops(world.device)
        self.seconds = {"data": 0.0, "compute": 0.0, "checkpoint": 0.0}
        self._since = time.perf_counter()

    def restart(self) -> None:
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        """All since the lap before was this."""
        if name == "compute" and self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        now = time.perf_counter()
        self.seconds[name] = now - self._since
        self._since = now

    def figures(self, batch: Batch, counted: bool = True) -> dict[str, float]:
        """Of this step; the time of a checkpoint is told with the step behind it.

        The share of the peak (MFU) counts what a step needs: nothing that is computed twice. Not
        counted: steps that gates take part in, whose work the formula does not know.
        """
        busy = self.seconds["data"] + self.seconds["compute"]
        tokens_per_second = self.schedule.batch_tokens / busy
        figures = {f"{name}_seconds": seconds for name, seconds in self.seconds.items()}
        figures |= {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / self.world.size,
        }
        if counted:
            lengths = batch.cu_seqlens.diff().tolist()
            flops = training_flops(self.config, self.num_weights, lengths) / busy
            figures["tflops_per_device"] = flops / 1e12
            if self.peak is not None:
                figures["mfu"] = flops / self.peak
        if self.world.device.type == "cuda":
            figures["memory_gb"] = torch.cuda.max_memory_allocated(self.world.device) / 1e9
        return figures
