"""TensorBoard's curves of a training, made from what the run keeps anyway, and made anew at any
time; eval/report/tensorboard.py adds evaluations, mask and settings.

    tb/train/   train/metrics.jsonl, row by row
    tb/mask/    the same of a mask that is learned: mask/metrics.jsonl

Every figure is there twice. `train/loss` stands against steps, `tokens/train/loss` against tokens,
those that a mask was learned from among them: the axis on which runs with different batches are
comparable (TensorBoard's axis says "step" there too: what is written as the step is a number of
tokens).

A folder's points always lie in one file, in the order of their steps: TensorBoard shows a point
twice that a second file repeats, and drops what lies behind a step that arrives late. So a run that
goes on and an evaluation that comes late have their folder written whole, from the rows.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from bosch.run.progress import say

METRICS = "metrics.jsonl"
FOLDER = "tb"
BY_TOKENS = "tokens/"  # in front of the tags that stand against tokens

Row = Mapping[str, Any]


class TrainingCurves:
    """tb/train, or tb/mask: the rows there are, and those to come."""

    def __init__(self, run_path: Path, rows: Iterable[Row], name: str = "train") -> None:
        self._file: EventFile | None = None
        self._name = name
        with as_far_as_possible(run_path):
            self._file = EventFile.in_place_of_others(
                run_path / FOLDER / name, _training_events(rows, name)
            )

    def add(self, row: Row) -> None:
        if self._file is None:
            return
        try:
            self._file.add(_training_events([row], self._name))
        except OSError as error:  # told once: a run of days shall not repeat it at every step
            say(f"TensorBoard: no more curves ({error}); compare_runs.py --rebuild-tb makes them")
            self._file = None


@contextlib.contextmanager
def as_far_as_possible(run_path: Path) -> Iterator[None]:
    """A picture of results that cannot be drawn ends nothing: the results are elsewhere."""
    try:
        yield
    except (OSError, ValueError) as error:
        say(
            f"TensorBoard: {run_path / FOLDER} cannot be written ({error}); compare_runs.py "
            "--rebuild-tb makes it later"
        )


# --------------------------------------------------------------------------------------------- rows


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. A last line that a kill tore off does not count."""
    rows = []
    for number, line in enumerate(path.read_text(errors="replace").split("\n")[:-1], 1):
        try:
            row = json.loads(line)
            _ = row["step"], row["tokens"]  # every row has both
        except (ValueError, KeyError, TypeError):
            say(f"{path}, line {number} is damaged and left out")
            continue
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------- events


def _training_events(rows: Iterable[Row], prefix: str) -> Iterator[Event]:
    for row in rows:
        figures = {
            f"{prefix}/{name}": float(value)
            for name, value in row.items()
            if name not in ("step", "tokens", "time") and is_finite(value)
        }
        yield from on_both_axes(row["step"], row["tokens"], figures, row.get("time"))


def on_both_axes(
    step: int, tokens: int | None, figures: Mapping[str, float], when: float | None
) -> Iterator[Event]:
    if not figures:
        return
    when = time.time() if when is None else when
    axes = {"": step} if tokens is None else {"": step, BY_TOKENS: tokens}
    for prefix, place in axes.items():
        values = [Summary.Value(tag=prefix + t, simple_value=v) for t, v in figures.items()]
        yield Event(step=place, wall_time=when, summary=Summary(value=values))


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# ------------------------------------------------------------------------------------------- a file


class EventFile:
    """A TensorBoard file, opened only while something is added. The library's own writer adds in a
    thread, where a full disk ends the thread and is not heard of."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def in_place_of_others(cls, folder: Path, events: Iterable[Event]) -> "EventFile":
        """A new file with these events; those that were in the folder go."""
        folder.mkdir(parents=True, exist_ok=True)
        old = sorted(path for path in folder.iterdir() if "tfevents" in path.name)
        # A name that sorts behind every other, whatever the clock says: TensorBoard takes files in
        # the order of their names.
        numbers = [int(path.name.split(".")[3]) for path in old if path.name.endswith(".bosch")]
        temporary = cls(folder / ".new.tmp")
        temporary.path.unlink(missing_ok=True)
        source = SourceMetadata(writer="bosch")
        begin = Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source)
        temporary.add([begin, *events])
        for path in old:
            path.unlink()
        name = f"events.out.tfevents.{max(numbers, default=0) + 1:010d}.bosch"
        return cls(temporary.path.rename(folder / name))

    def add(self, events: Iterable[Event]) -> None:
        with self.path.open("ab") as file:
            records = RecordWriter(file)
            for event in events:
                records.write(event.SerializeToString())
