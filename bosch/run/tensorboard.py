"""TensorBoard's training curves, made from the metrics of a run; they can be rebuilt at any time.
eval/report/tensorboard.py adds evaluations, mask and settings.

    tb/train/   train/metrics.jsonl, row by row
    tb/mask/    mask/metrics.jsonl, of a mask that is learned

Every scalar is written twice: `train/loss` over steps and `tokens/train/loss` over training tokens,
including those of a learned mask. Runs with different batch sizes are comparable over tokens.
(TensorBoard calls that axis "step" too: what is written as the step is a number of tokens.)

All points of a folder are in one file, in the order of their steps: TensorBoard shows a point twice
if a second file repeats it, and drops a point whose step comes after a larger one. So a run that
resumes, or an evaluation that comes late, writes the whole file of its folder again.
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

from bosch.run.lines import read_lines
from bosch.run.progress import say

METRICS = "metrics.jsonl"
FOLDER = "tb"
BY_TOKENS = "tokens/"  # prefix of the tags over tokens

Row = Mapping[str, Any]


class TrainingCurves:
    """tb/train or tb/mask: the rows so far, and those to come."""

    def __init__(self, run_path: Path, rows: Iterable[Row], name: str = "train") -> None:
        self._file: Path | None = None
        self._name = name
        with tolerating_write_errors(run_path):
            self._file = replace_events(run_path / FOLDER / name, _training_events(rows, name))

    def add(self, row: Row) -> None:
        if self._file is None:
            return
        try:
            append_events(self._file, _training_events([row], self._name))
        except OSError as error:  # said once, not at every step of a long run
            say(f"TensorBoard: no more curves ({error}); compare_runs.py --rebuild-tb makes them")
            self._file = None


@contextlib.contextmanager
def tolerating_write_errors(run_path: Path) -> Iterator[None]:
    """Failing to write curves does not stop a run: its results are in other files."""
    try:
        yield
    except OSError as error:
        say(
            f"TensorBoard: cannot write {run_path / FOLDER} ({error}); compare_runs.py "
            "--rebuild-tb writes it later"
        )


# --------------------------------------------------------------------------------------------- rows


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. A last line that a kill cut off is ignored."""
    rows = []
    for number, row in read_lines(path):
        if row is None or any(type(row.get(name)) is not int for name in ("step", "tokens")):
            say(f"left out {path}, line {number}: it is damaged")
            continue
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------- events


def _training_events(rows: Iterable[Row], prefix: str) -> Iterator[Event]:
    for row in rows:
        scalars = {
            f"{prefix}/{name}": float(value)
            for name, value in row.items()
            if name not in ("step", "tokens", "time") and is_finite(value)
        }
        yield from on_both_axes(row["step"], row["tokens"], scalars, row.get("time"))


def on_both_axes(
    step: int, tokens: int | None, scalars: Mapping[str, float], when: float | None
) -> Iterator[Event]:
    if not scalars:
        return
    when = time.time() if when is None else when
    axes = {"": step} if tokens is None else {"": step, BY_TOKENS: tokens}
    for prefix, place in axes.items():
        values = [Summary.Value(tag=prefix + t, simple_value=v) for t, v in scalars.items()]
        yield Event(step=place, wall_time=when, summary=Summary(value=values))


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# ------------------------------------------------------------------------------------------- a file


def replace_events(folder: Path, events: Iterable[Event]) -> Path:
    """Write a file with these events, in place of all files in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    old = sorted(path for path in folder.iterdir() if "tfevents" in path.name)
    # TensorBoard reads files in the order of their names: sort after every older one, whatever the
    # clock says.
    numbers = [int(path.name.split(".")[3]) for path in old if path.name.endswith(".bosch")]
    temporary = folder / ".new.tmp"
    temporary.unlink(missing_ok=True)
    source = SourceMetadata(writer="bosch")
    begin = Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source)
    append_events(temporary, [begin, *events])
    for path in old:
        path.unlink()
    name = f"events.out.tfevents.{max(numbers, default=0) + 1:010d}.bosch"
    return temporary.rename(folder / name)


def append_events(path: Path, events: Iterable[Event]) -> None:
    """The file is open only meanwhile. The library's own writer uses a thread, which a full disk
    ends without a word."""
    with path.open("ab") as file:
        records = RecordWriter(file)
        for event in events:
            records.write(event.SerializeToString())
