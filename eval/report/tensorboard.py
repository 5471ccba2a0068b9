"""What TensorBoard shows of a run besides its training's curves (bosch/run/tensorboard.py), made
from what the run keeps anyway, and made anew at any time.

    tb/eval/    the rows of eval/*/*/scores.json, against steps and against tokens
    tb/dense/   those of the dense model, as level lines to compare with
    tb/         the mask as an image, settings and last scores for the HParams table, a page of
                text, and charts put together: they stand against tokens and are the same for every
                run, so that `tensorboard --logdir runs` draws all runs into one
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams

from bosch.eval.report.measures import AVERAGE, Row
from bosch.eval.report.runs import RunResults, read_json, read_run
from bosch.eval.report.tables import markdown_lines, settings_by_section
from bosch.eval.suites import longbench
from bosch.masks.picture import mask_title
from bosch.run.errors import MissingFileError
from bosch.run.progress import say
from bosch.run.tensorboard import (
    FOLDER,
    METRICS,
    EventFile,
    TrainingCurves,
    as_far_as_possible,
    is_finite,
    on_both_axes,
    read_metrics,
)

# Page -> chart -> regular expressions of tags.
CHARTS = {
    "NIAH": {
        "average": ["tokens/niah/average/string_match_all$"],
        "single needle, by length": [r"tokens/niah/single/\d+/string_match_all$"],
        "many keys, by length": [r"tokens/niah/multikey/\d+/string_match_all$"],
    },
    "LongBench": {
        name: [f"tokens/longbench/{name}/mean$"]
        for name in (AVERAGE, *longbench.category_table("paper"))
    },
    "loss": {
        "training loss": ["tokens/train/loss$"],
        "validation loss": ["tokens/train/validation_loss$"],
        "learning rate": ["tokens/train/learning_rate$"],
    },
}


def rebuild_tensorboard(run_path: Path) -> None:
    """All of the run's TensorBoard files, from its metrics, scores and mask."""
    if not run_path.is_dir():
        raise MissingFileError(f"{run_path} is not a run folder.")
    for name in ("mask", "train"):
        metrics = run_path / name / METRICS
        if metrics.is_file():
            TrainingCurves(run_path, read_metrics(metrics), name)
    project_evaluations(run_path)


def project_evaluations(run_path: Path) -> None:
    """tb/eval, tb/dense and what tells the run, from all that the run has. Call it whenever there
    are new scores."""
    run = read_run(run_path)
    for problem in run.problems:
        say(f"TensorBoard: {problem}")
    with as_far_as_possible(run_path):
        for name, events in (("eval", _evaluations(run.rows)), ("dense", _level_lines(run.rows))):
            folder = run_path / FOLDER / name
            if (found := list(events)) or folder.is_dir():
                EventFile.in_place_of_others(folder, found)
        told = [Event(wall_time=time.time(), summary=_plain(summary)) for summary in _facts(run)]
        EventFile.in_place_of_others(run_path / FOLDER, told)


def _evaluations(rows: Sequence[Row]) -> Iterator[Event]:
    own = [row for row in rows if row["step"] is not None]
    for row in sorted(own, key=lambda row: row["step"]):
        yield from on_both_axes(row["step"], row["tokens"], _figure(row), None)


def _level_lines(rows: Sequence[Row]) -> Iterator[Event]:
    """The dense model's scores at both ends of the evaluated steps."""
    ends = [(row["step"], row["tokens"]) for row in rows if row["step"] is not None]
    for step, tokens in sorted({(0, 0), max(ends, default=(0, 0))}):
        for row in rows:
            if row["step"] is None:
                yield from on_both_axes(step, tokens, _figure(row), None)


def _figure(row: Row) -> dict[str, float]:
    names = (row["suite"], row["task"], row.get("length"), row["metric"])
    value = row["value"]
    tag = "/".join(str(name) for name in names if name)  # an average has no length
    return {tag: float(value)} if is_finite(value) else {}


def _facts(run: RunResults) -> Iterator[Any]:
    """The mask's picture, charts, text, and a row of the HParams table, whose metrics are the
    curves' last points."""
    # Importing torch's writers takes long.
    from torch.utils.tensorboard.summary import custom_scalars, text

    picture = run.path / "mask" / "mask.png"
    if run.mask is not None and picture.is_file():
        yield _image("mask", picture.read_bytes())
    told = read_json(run.path / "run.json", [])
    config = told.get("config", {})
    facts = _hparams(run, config)
    tags = sorted({tag for row in run.rows for tag in _figure(row)})
    metrics = [hparams.Metric("train/loss", group="train")]
    metrics += [hparams.Metric(tag, group="eval") for tag in tags if "/average/" in tag]
    # A fixed time and name: the same run, the same row, however often it is written.
    names = [hparams.HParam(name) for name in facts]
    yield hparams.hparams_config_pb(names, metrics, time_created_secs=0.0)
    yield hparams.hparams_pb(facts, trial_id=run.name, start_time_secs=0.0)
    pages = {
        page: {title: ["Multiline", tags] for title, tags in charts.items()}
        for page, charts in CHARTS.items()
    }
    yield custom_scalars(pages)
    yield text("run", "\n\n".join(_paragraphs(run, told.get("command", []), config)))


def _hparams(run: RunResults, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the mask, and the settings of training that have one value each."""
    facts: dict[str, Any] = {"run": run.name}
    if run.mask is not None:
        mask = run.mask.mask
        facts |= {"model": run.mask.model.id, "method": run.mask.method, "ratio": mask.ratio}
        facts |= {"window": mask.window_tokens, "unit": mask.unit}
    kept = {"seed": config.get("seed"), "tokens": config.get("data", {}).get("tokens")}
    if options := config.get("mask", {}).get("options"):
        kept["options"] = " ".join(options)
    kept |= {f"train.{name}": value for name, value in config.get("train", {}).items()}
    return facts | {name: v for name, v in kept.items() if isinstance(v, str | int | float)}


def _paragraphs(
    run: RunResults, command: Sequence[str], config: Mapping[str, Any]
) -> Iterator[str]:
    yield f"**{run.name}**"
    if run.mask is not None:
        yield f"Mask: {mask_title(run.mask)}"
    averages = [row for row in run.rows if row["task"] == AVERAGE]
    if averages:
        steps = sorted({row["step"] for row in averages if row["step"] is not None})
        columns: list[int | None] = [None, *dict.fromkeys([*steps[:1], *steps[-1:]])]
        header = ["dense" if step is None else f"step {step}" for step in columns]
        rows = []
        for suite in dict.fromkeys(row["suite"] for row in averages):
            found = {row["step"]: row["value"] for row in averages if row["suite"] == suite}
            shown = [f"{found[step]:.1f}" if step in found else "–" for step in columns]
            rows.append([suite, *shown])
        yield "\n".join(markdown_lines(["average", *header], rows))
    if config:
        yield f"Command: `recover.py {' '.join(command)}`"
        yield "\n".join(f"- **{name}**: {told}" for name, told in settings_by_section(config))


def _image(tag: str, png: bytes) -> Summary:
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))  # of the header
    image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _plain(summary: Any) -> Summary:
    """torch has another build of the protocol's classes."""
    return Summary.FromString(summary.SerializeToString())
