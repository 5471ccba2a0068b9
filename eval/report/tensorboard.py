"""What TensorBoard shows of a run besides its training curves (bosch/run/tensorboard.py), made from
the files of the run; it can be rebuilt at any time.

    tb/    the rows of eval/*/*/scores.json, over steps and over tokens; the mask as an image,
           settings and last scores for the HParams table, and a page of text
    ../shared/dense-XXXXXXXX/    the dense model's scores, as horizontal lines, once for all runs
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams

from bosch.eval.report.runs import RunResults, read_run
from bosch.eval.report.tables import kv_saved
from bosch.eval.suites._reporting import AVERAGE, Row
from bosch.masks.picture import mask_title
from bosch.model_files import read_json_object
from bosch.run import tensorboard as curve_files
from bosch.run.fingerprint import fingerprint
from bosch.run.plain_text import markdown, markdown_table, visible
from bosch.run.progress import say
from bosch.run.stage import flatten


def rebuild_tensorboard(run_path: Path) -> None:
    """Write all TensorBoard files of a run, from its metrics, scores and mask."""
    run = read_run(run_path)
    for problem in run.problems:
        say(f"TensorBoard: {problem}")
    curves: list[Event] = []
    times: dict[int, float] = {}
    for name in ("mask", "train"):
        rows = curve_files.read_metrics(run_path / name / curve_files.METRICS)
        curves += curve_files.training_events(rows, name)
        times = {row["step"]: row["time"] for row in rows if "time" in row}
    with_step = [row for row in run.rows if row["step"] is not None]
    for row in sorted(with_step, key=lambda row: row["step"]):
        when = times.get(row["step"])  # it was trained
        curves += curve_files.on_both_axes(row["step"], row["tokens"], _scalar(row), when)
    with curve_files.tolerating_write_errors(run_path):
        # As TensorBoard's class: torch has another build of the protocol's classes.
        plain = [Summary.FromString(one.SerializeToString()) for one in _describe_run(run)]
        events = [Event(wall_time=time.time(), summary=summary) for summary in plain]
        curve_files.replace_events(run_path / curve_files.FOLDER, [*events, *curves])
        _draw_dense_lines(run_path.parent / "shared", run.rows)


def _draw_dense_lines(shared: Path, rows: Sequence[Row]) -> None:
    """The dense model's scores, at the start and at the last step of all runs so far."""
    scalars: dict[str, float] = {}
    for row in rows:
        scalars |= _scalar(row) if row["step"] is None else {}
    if not scalars:
        return
    folder = shared / f"dense-{fingerprint(scalars)[:8]}"
    ends = [(row["step"], row["tokens"]) for row in rows if row["step"] is not None]
    step, tokens = max(ends, default=(0, 0))
    for event in curve_files.read_events(folder):
        if curve_files.tags_of(event)[0].startswith(curve_files.BY_TOKENS):
            tokens = max(tokens, event.step)
        else:
            step = max(step, event.step)
    places = sorted({(0, 0), (step, tokens)})
    found = [e for place in places for e in curve_files.on_both_axes(*place, scalars, None)]
    curve_files.replace_events(folder, found)


def _scalar(row: Row) -> dict[str, float]:
    """The row's tag and value; empty if the value is not a finite number."""
    names = (row["suite"], row["task"], row.get("length"), row["metric"])
    value = row["value"]
    tag = "/".join(visible(name) for name in names if name)  # an average has no length
    return {tag: float(value)} if curve_files.is_finite(value) else {}


def _describe_run(run: RunResults) -> Iterator[Any]:
    """The mask's picture, a row of the HParams table (whose metrics are the last points of the
    curves), text."""
    from torch.utils.tensorboard.summary import text  # slow to import

    picture = run.path / "mask" / "mask.png"
    if run.mask is not None and picture.is_file() and not picture.is_symlink():
        png = picture.read_bytes()
        width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
        image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
        yield Summary(value=[Summary.Value(tag="mask", image=image)])
    settings = _hparams(run)
    tags = sorted({tag for row in run.rows for tag in _scalar(row)})
    averages = [tag for tag in tags if f"/{AVERAGE}/" in tag]
    metrics = [hparams.Metric(tag) for tag in ("train/loss", *averages)]
    # With a fixed time and name a run is the same row of the table however often it is written.
    names = [hparams.HParam(name) for name in settings]
    yield hparams.hparams_config_pb(names, metrics, time_created_secs=0.0)
    yield hparams.hparams_pb(settings, trial_id=visible(run.name), start_time_secs=0.0)
    paragraphs = [f"**{markdown(run.name)}**"]
    if run.mask is not None:
        paragraphs.append(f"Mask: {markdown(mask_title(run.mask))}")
    if run.config:
        command = read_json_object(run.path / "run.json").get("command", [])
        paragraphs.append(f"Command: {markdown(' '.join(['recover.py', *map(str, command)]))}")
        lines = markdown_table(("settings", ""), list(flatten(run.config).items()))
        paragraphs.append("\n".join(lines))
    yield text("run", "\n\n".join(paragraphs))


def _hparams(run: RunResults) -> dict[str, str | int | float]:
    """The mask's facts, and the training settings that are single values."""
    facts: dict[str, object] = {"run": run.name}
    if run.mask is not None:
        mask = run.mask.mask
        facts |= {"model": run.mask.model.id, "method": run.mask.method, "ratio": mask.ratio}
        facts |= {"window": mask.window_tokens, "unit": mask.unit, "KV saved": kv_saved(run)}
    settings = run.settings
    facts |= {"seed": settings["seed"], "tokens": settings.get("data.tokens")}
    facts["options"] = settings["mask.options"] or None
    facts |= {name: value for name, value in settings.items() if name.startswith("train.")}
    return {
        visible(name): visible(value) if isinstance(value, str) else value
        for name, value in facts.items()
        if isinstance(value, str | int | float)
    }
