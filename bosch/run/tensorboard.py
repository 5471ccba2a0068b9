"""TensorBoard's training curves, made from the metrics of a run; they can be rebuilt at any time.
eval/report/tensorboard.py adds evaluations, mask and settings.

    tb/    the rows of train/metrics.jsonl, and of mask/metrics.jsonl of a mask that is learned

Every scalar is written twice: `train/loss` over steps and `tokens/train/loss` over training tokens,
including those of a learned mask, which compares runs with different batch sizes.

All points are in one file, those of a tag in the order of their steps: TensorBoard shows a point
twice if a second file repeats it, and drops a point whose step comes after a larger one. So a run
that resumes, or an evaluation that comes late, writes the whole file again.
"""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from bosch.run.files import read_lines, temporary_file
from bosch.run.progress import say

METRICS = "metrics.jsonl"
FOLDER = "tb"
BY_TOKENS = "tokens/"  # prefix of the tags over tokens

Row = Mapping[str, Any]


class TrainingCurves:
    """The rows so far, in place of those of earlier attempts, and those to come."""

    def __init__(self, run_path: Path, rows: Iterable[Row], name: str = "train") -> None:
        self._folder, self._name, self._works = run_path / FOLDER, name, False
        own = tuple(f"{axis}{name}/" for axis in ("", BY_TOKENS))
        with tolerating_write_errors(run_path):
            others = [
                e for e in read_events(self._folder) if not e.summary.value[0].tag.startswith(own)
            ]
            replace_events(self._folder, [*others, *training_events(rows, name)])
            self._works = True

    def add(self, row: Row) -> None:
        if self._works:
            self._works = False  # what went wrong is said once, not at every step of a long run
            with tolerating_write_errors(self._folder.parent):
                append(newest_file(self._folder), training_events([row], self._name))
                self._works = True


@contextlib.contextmanager
def tolerating_write_errors(run_path: Path) -> Iterator[None]:
    """Curves that cannot be written do not stop a run: its results are in other files."""
    try:
        yield
    except OSError as error:
        place = run_path / FOLDER
        say(f"TensorBoard: cannot write {place} ({error}); the same command does later")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. A last line that a kill cut off is ignored."""
    rows = []
    for number, row in read_lines(path):
        if row and type(row.get("step")) is int and type(row.get("tokens")) is int:
            rows.append(row)
        else:
            say(f"left out {path}, line {number}: it is damaged")
    return rows


def training_events(rows: Iterable[Row], prefix: str) -> Iterator[Event]:
    for row in rows:
        scalars = {
            f"{prefix}/{name}": float(value)
            for name, value in row.items()
            if name not in ("step", "tokens", "time")
            # A loss that overflowed is no point of a curve: TensorBoard draws nothing for it.
            and isinstance(value, int | float)
            and math.isfinite(value)
        }
        yield from on_both_axes(row["step"], row["tokens"], scalars, row.get("time"))


def on_both_axes(
    step: int, tokens: int | None, scalars: Mapping[str, float], when: float | None
) -> Iterator[Event]:
    when = time.time() if when is None else when
    for prefix, place in {"": step, BY_TOKENS: tokens}.items():
        values = [Summary.Value(tag=prefix + t, simple_value=v) for t, v in scalars.items()]
        if values and place is not None:
            yield Event(step=place, wall_time=when, summary=Summary(value=values))


def replace_events(folder: Path, events: Iterable[Event]) -> None:
    """A new file with these events, in place of all files in the folder."""
    # TensorBoard's EventFileWriter writes in a thread: a full disk ends the thread with a traceback
    # and not the training's curves with a sentence.
    folder.mkdir(parents=True, exist_ok=True)
    old, number = [*folder.glob("*tfevents*")], int(newest_file(folder).name.split(".")[3])
    temporary = temporary_file(folder / "events")
    source = SourceMetadata(writer="bosch")
    begin = Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source)
    # Whole under another name first: TensorBoard may be reading the folder.
    append(temporary, [begin, *events])
    for path in old:
        if path.is_dir():  # in the place of a file: TensorBoard would fail at it
            with contextlib.suppress(OSError):  # it is not empty, so it is not ours
                path.rmdir()
        else:
            path.unlink(missing_ok=True)  # another run may replace a shared folder's now
    temporary.rename(folder / f"events.out.tfevents.{number + 1:010d}.bosch")


def append(path: Path, events: Iterable[Event]) -> None:
    with path.open("ab") as file:
        records = RecordWriter(file)
        for event in events:
            records.write(event.SerializeToString())


def read_events(folder: Path) -> list[Event]:
    """Those with values, of our own file, up to the first damaged byte."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    path, events = newest_file(folder), []
    with contextlib.suppress(Exception):  # errors of every type; all can be rebuilt
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            if event.summary.value:  # the first event of a file has none
                events.append(event)
    return events


def newest_file(folder: Path) -> Path:
    """Of our own: TensorBoard reads files in the order of their names, whatever the clock says."""
    ours = [path for path in folder.glob("*tfevents*.bosch") if path.is_file()]
    return max(ours, default=folder / "events.out.tfevents.0000000000.bosch")
