"""TensorBoard files of a run, made from what the run keeps anyway, and made anew at any time.

    tb/train/   train/metrics.jsonl, row by row
    tb/mask/    the same of a mask that is learned: mask/metrics.jsonl
    tb/eval/    the rows of eval/**/scores.json
    tb/dense/   those of the dense model, as level lines to compare with
    tb/         the mask as an image, settings and last scores for the HParams table, and what
                bosch/run/tensorboard_layout.py adds: charts put together, a page of text

Every figure is there twice. `train/loss` and `niah/average/string_match_all` stand against steps,
`tokens/train/loss` and so on against tokens, those that a mask was learned from among them: the
axis on which runs with different batches are comparable (TensorBoard's axis says "step" there too:
what is written as the step is a number of tokens).

A folder's points always lie in one file, in the order of their steps: TensorBoard shows a point
twice that a second file repeats, and drops what lies behind a step that arrives late. So a run that
goes on and an evaluation that comes late have their folder written whole, from the rows.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.summary.writer.record_writer import RecordWriter

from bosch.masks.mask import read_mask
from bosch.run import tensorboard_layout
from bosch.run.plan import follow_reference
from bosch.run.progress import say

METRICS = "metrics.jsonl"
FOLDER = "tb"
BY_TOKENS = "tokens/"  # in front of the tags that stand against tokens

Row = Mapping[str, Any]


def rebuild_tensorboard(run_path: Path) -> None:
    """All of the run's TensorBoard files, from its metrics, scores and mask."""
    if not run_path.is_dir():
        raise FileNotFoundError(f"{run_path} is not a run folder.")
    for name in ("mask", "train"):
        metrics = run_path / name / METRICS
        if metrics.is_file():
            TrainingCurves(run_path, read_metrics(metrics), name)
    project_evaluations(run_path)


class TrainingCurves:
    """tb/train, or tb/mask: the rows there are, and those to come."""

    def __init__(self, run_path: Path, rows: Iterable[Row], name: str = "train") -> None:
        self._file: EventFile | None = None
        self._name = name
        with _as_far_as_possible(run_path):
            self._file = EventFile.in_place_of_others(
                run_path / FOLDER / name, _training_events(rows, name)
            )
            _write_facts(run_path)

    def add(self, row: Row) -> None:
        if self._file is None:
            return
        try:
            self._file.add(_training_events([row], self._name))
        except OSError as error:  # told once: a run of days shall not repeat it at every step
            say(f"TensorBoard: no more curves ({error}); compare_runs.py --rebuild-tb makes them")
            self._file = None


def project_evaluations(run_path: Path) -> None:
    """tb/eval and tb/dense, from all scores the run has. Call it whenever there are new ones."""
    rows = read_evaluation_rows(run_path)
    with _as_far_as_possible(run_path):
        for name, events in (("eval", _evaluation_events(rows)), ("dense", _level_lines(rows))):
            folder = run_path / FOLDER / name
            if (found := list(events)) or folder.is_dir():
                EventFile.in_place_of_others(folder, found)
        _write_facts(run_path)


@contextlib.contextmanager
def _as_far_as_possible(run_path: Path) -> Iterator[None]:
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


def read_evaluation_rows(run_path: Path) -> list[dict[str, Any]]:
    """The rows of every scores.json of a run. step None: the dense model."""
    rows: list[dict[str, Any]] = []
    for folder in sorted((run_path / "eval").glob("*")):
        for path in sorted(follow_reference(folder).glob("*/scores.json")):
            try:
                rows += json.loads(path.read_text())["rows"]
            except (ValueError, KeyError, TypeError):
                say(f"{path} is damaged and left out of TensorBoard")
    return rows


# ------------------------------------------------------------------------------------------- events


def _training_events(rows: Iterable[Row], prefix: str) -> Iterator[Event]:
    for row in rows:
        figures = {
            f"{prefix}/{name}": float(value)
            for name, value in row.items()
            if name not in ("step", "tokens", "time") and _is_finite(value)
        }
        yield from _on_both_axes(row["step"], row["tokens"], figures, row.get("time"))


def _evaluation_events(rows: Sequence[Row]) -> Iterator[Event]:
    own = [row for row in rows if row["step"] is not None]
    for row in sorted(own, key=lambda row: row["step"]):
        yield from _on_both_axes(row["step"], row["tokens"], _score(row), None)


def _level_lines(rows: Sequence[Row]) -> Iterator[Event]:
    """The dense model's scores at both ends of the evaluated steps."""
    ends = [(row["step"], row["tokens"]) for row in rows if row["step"] is not None]
    dense = [row for row in rows if row["step"] is None]
    for step, tokens in sorted({(0, 0), max(ends, default=(0, 0))}):
        for row in dense:
            yield from _on_both_axes(step, tokens, _score(row), None)


def _score(row: Row) -> dict[str, float]:
    names = (row["suite"], row["task"], row.get("length"), row["metric"])
    value = row["value"]
    tag = "/".join(str(name) for name in names if name)  # an average has no length
    return {tag: float(value)} if _is_finite(value) else {}


def _on_both_axes(
    step: int, tokens: int | None, figures: Mapping[str, float], when: float | None
) -> Iterator[Event]:
    if not figures:
        return
    when = time.time() if when is None else when
    axes = {"": step} if tokens is None else {"": step, BY_TOKENS: tokens}
    for prefix, place in axes.items():
        values = [Summary.Value(tag=prefix + t, simple_value=v) for t, v in figures.items()]
        yield Event(step=place, wall_time=when, summary=Summary(value=values))


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# ------------------------------------------------------------------------------- settings and mask


def _write_facts(run_path: Path) -> None:
    """The mask's picture and a row of the HParams table, whose metrics are the curves' last
    points."""
    mask_path = run_path / "mask" / "mask.json"
    facts: dict[str, Any] = {"run": run_path.resolve().name}
    summaries = []
    if mask_path.is_file():
        record = read_mask(mask_path)
        facts |= {
            "model": record.model.id,
            "method": record.method,
            "ratio": record.mask.ratio,
            "window": record.mask.window_tokens,
            "unit": record.mask.unit,
        }
        picture = mask_path.with_name("mask.png")
        if picture.is_file():
            summaries.append(_image("mask", picture.read_bytes()))
    facts |= _train_settings(run_path)
    rows = read_evaluation_rows(run_path)
    tags = sorted({tag for row in rows for tag in _score(row)})
    metrics = [hparams.Metric("train/loss", group="train")]
    metrics += [hparams.Metric(tag, group="eval") for tag in tags if "/average/" in tag]
    names = [hparams.HParam(name) for name in facts]
    # A fixed time and name: the same run, the same row, however often it is written.
    summaries += [
        hparams.hparams_config_pb(names, metrics, time_created_secs=0.0),
        hparams.hparams_pb(facts, trial_id=facts["run"], start_time_secs=0.0),
        tensorboard_layout.layout(),
        tensorboard_layout.run_text(run_path, rows),
    ]
    events = [
        Event(wall_time=time.time(), summary=Summary.FromString(summary.SerializeToString()))
        for summary in summaries
    ]
    EventFile.in_place_of_others(run_path / FOLDER, events)


def _train_settings(run_path: Path) -> dict[str, Any]:
    """The settings of training in run.json that have one value each."""
    path = run_path / "run.json"
    config = json.loads(path.read_text()).get("config", {}) if path.is_file() else {}
    kept = {"seed": config.get("seed"), "tokens": config.get("data", {}).get("tokens")}
    if options := config.get("mask", {}).get("options"):
        kept["options"] = " ".join(options)
    train = config.get("train", {})
    kept |= {f"train.{name}": value for name, value in train.items()}
    return {name: value for name, value in kept.items() if isinstance(value, str | int | float)}


def _image(tag: str, png: bytes) -> Summary:
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))  # of the header
    image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
    return Summary(value=[Summary.Value(tag=tag, image=image)])


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
