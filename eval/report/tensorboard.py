"""What TensorBoard shows of a run besides its training curves (bosch/run/tensorboard.py), made from
the files of the run; it can be rebuilt at any time.

    tb/eval/    the rows of eval/*/*/scores.json, over steps and over tokens
    tb/dense/   those of the dense model, as horizontal lines to compare with
    tb/         the mask as an image, settings and last scores for the HParams table, a page of
                text, and custom scalars: charts over tokens, the same for every run, so that
                `tensorboard --logdir runs` draws all runs into one
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams

from bosch.eval.report.cells import MISSING
from bosch.eval.report.runs import RunResults, read_json, read_run
from bosch.eval.report.scores import find_scores, read_value
from bosch.eval.report.tables import settings_by_section
from bosch.eval.suites._reporting import AVERAGE, Row, reporting_of
from bosch.masks.picture import mask_title
from bosch.run.errors import MissingFileError
from bosch.run.plain_text import markdown, markdown_table, visible
from bosch.run.progress import say
from bosch.run.tensorboard import (
    FOLDER,
    METRICS,
    TrainingCurves,
    is_finite,
    on_both_axes,
    read_metrics,
    replace_events,
    tolerating_write_errors,
)

# Chart -> regular expressions of tags.
LOSS_CHARTS = {
    "training loss": ["tokens/train/loss$"],
    "validation loss": ["tokens/train/validation_loss$"],
    "learning rate": ["tokens/train/learning_rate$"],
}


def rebuild_tensorboard(run_path: Path) -> None:
    """Write all TensorBoard files of a run, from its metrics, scores and mask."""
    if not run_path.is_dir():
        raise MissingFileError(f"{run_path} is not a run folder; name one, such as runs/NAME.")
    for name in ("mask", "train"):
        metrics = run_path / name / METRICS
        if metrics.is_file():
            TrainingCurves(run_path, read_metrics(metrics), name)
    project_evaluations(run_path)


def project_evaluations(run_path: Path) -> None:
    """Write everything but the training curves. Call it whenever there are new scores."""
    run = read_run(run_path)
    for problem in run.problems:
        say(f"TensorBoard: {problem}")
    with tolerating_write_errors(run_path):
        events_by_folder = {"eval": _evaluations(run.rows), "dense": _dense_lines(run.rows)}
        for name, events in events_by_folder.items():
            folder = run_path / FOLDER / name
            if (listed := list(events)) or folder.is_dir():
                replace_events(folder, listed)
        summaries = [_plain(summary) for summary in _describe_run(run)]
        events = (Event(wall_time=time.time(), summary=summary) for summary in summaries)
        replace_events(run_path / FOLDER, events)


def _evaluations(rows: Sequence[Row]) -> Iterator[Event]:
    with_step = [row for row in rows if row["step"] is not None]
    for row in sorted(with_step, key=lambda row: row["step"]):
        yield from on_both_axes(row["step"], row["tokens"], _scalar(row), None)


def _dense_lines(rows: Sequence[Row]) -> Iterator[Event]:
    """The dense model's scores at the first and the last evaluated step."""
    ends = [(row["step"], row["tokens"]) for row in rows if row["step"] is not None]
    for step, tokens in sorted({(0, 0), max(ends, default=(0, 0))}):
        for row in rows:
            if row["step"] is None:
                yield from on_both_axes(step, tokens, _scalar(row), None)


def _scalar(row: Row) -> dict[str, float]:
    """The row's tag and value; empty if the value is not a finite number."""
    names = (row["suite"], row["task"], row.get("length"), row["metric"])
    value = row["value"]
    tag = "/".join(visible(name) for name in names if name)  # an average has no length
    return {tag: float(value)} if is_finite(value) else {}


def _describe_run(run: RunResults) -> Iterator[Any]:
    """The mask's picture, a row of the HParams table (whose metrics are the last points of the
    curves), custom scalars, text."""
    # Importing torch's writers is slow.
    from torch.utils.tensorboard.summary import custom_scalars, text

    picture = run.path / "mask" / "mask.png"
    if run.mask is not None and picture.is_file() and not picture.is_symlink():
        yield _image("mask", picture.read_bytes())
    record = read_json(run.path / "run.json", [])
    config = record.get("config", {})
    settings = _hparams(run, config)
    tags = sorted({tag for row in run.rows for tag in _scalar(row)})
    metrics = [hparams.Metric("train/loss", group="train")]
    metrics += [hparams.Metric(tag, group="eval") for tag in tags if f"/{AVERAGE}/" in tag]
    # With a fixed time and name a run is the same row of the table however often it is written.
    names = [hparams.HParam(name) for name in settings]
    yield hparams.hparams_config_pb(names, metrics, time_created_secs=0.0)
    yield hparams.hparams_pb(settings, trial_id=visible(run.name), start_time_secs=0.0)
    yield custom_scalars(_layout(run.rows))
    yield text("run", "\n\n".join(_paragraphs(run, record.get("command", []), config)))


def _layout(rows: Sequence[Row]) -> dict[str, dict[str, list[object]]]:
    """Page -> chart -> its kind and tags: a page for each suite and one for the losses."""
    pages: dict[str, dict[str, list[str]]] = {}
    for suite in dict.fromkeys(score.suite for score in find_scores(rows)):
        reporting = reporting_of(suite)
        charts = reporting.charts([row for row in rows if row["suite"] == suite])
        start = f"tokens/{re.escape(suite)}/"
        pages[reporting.title] = {c: [start + tag for tag in tags] for c, tags in charts.items()}
    pages["loss"] = LOSS_CHARTS
    return {
        title: {chart: ["Multiline", tags] for chart, tags in page.items()}
        for title, page in pages.items()
    }


def _hparams(run: RunResults, config: Mapping[str, Any]) -> dict[str, str | int | float]:
    """The mask's facts, and the training settings that are single values."""
    facts: dict[str, str | int | float] = {"run": run.name}
    if run.mask is not None:
        mask = run.mask.mask
        facts |= {"model": run.mask.model.id, "method": run.mask.shown_method, "ratio": mask.ratio}
        facts |= {"window": mask.window_tokens, "unit": mask.unit}
    settings = {"seed": config.get("seed"), "tokens": config.get("data", {}).get("tokens")}
    if options := config.get("mask", {}).get("options"):
        settings["options"] = " ".join(options)
    settings |= {f"train.{name}": value for name, value in config.get("train", {}).items()}
    facts |= {name: v for name, v in settings.items() if isinstance(v, str | int | float)}
    return {visible(n): visible(v) if isinstance(v, str) else v for n, v in facts.items()}


def _paragraphs(
    run: RunResults, command: Sequence[str], config: Mapping[str, object]
) -> Iterator[str]:
    yield f"**{markdown(run.name)}**"
    if run.mask is not None:
        yield f"Mask: {markdown(mask_title(run.mask))}"
    averages = [score for score in find_scores(run.rows) if score.kind == "average"]
    if averages:
        steps = sorted({row["step"] for row in run.rows if row["step"] is not None})
        columns: list[int | None] = [None, *dict.fromkeys([*steps[:1], *steps[-1:]])]
        header = ["dense" if step is None else f"step {step}" for step in columns]
        lines = []
        for score in averages:
            rows_of = [[row for row in run.rows if row["step"] == step] for step in columns]
            values = [read_value(score, rows) for rows in rows_of]
            cells = [f"{value.value:.1f}" if value else MISSING for value in values]
            lines.append([reporting_of(score.suite).title, *cells])
        yield "\n".join(markdown_table([AVERAGE, *header], lines))
    if config:
        yield f"Command: {markdown(' '.join(['recover.py', *map(str, command)]))}"
        settings = settings_by_section(config)
        yield "\n".join(f"- **{markdown(name)}**: {markdown(text)}" for name, text in settings)


def _image(tag: str, png: bytes) -> Summary:
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))  # in the header
    image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _plain(summary: Any) -> Summary:
    """As TensorBoard's class: torch has another build of the protocol's classes."""
    return Summary.FromString(summary.SerializeToString())
