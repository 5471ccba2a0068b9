"""What TensorBoard shows of a run besides its training curves (bosch/run/tensorboard.py), made from
the files of the run; it can be rebuilt at any time.

    tb/    the rows of eval/*/*/scores.json, over steps and over tokens; settings, last scores and
           tokens until shares of a gap are closed for the HParams table
    ../shared/dense-XXXXXXXX/    the dense model's scores, as horizontal lines, once for all runs
"""

import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams import summary_v2 as hparams

from bosch.eval.report.compare import compare
from bosch.eval.report.intervals import NEVER
from bosch.eval.report.runs import RunResults, read_run
from bosch.eval.report.tables import kv_saved
from bosch.eval.suites._reporting import AVERAGE, Row
from bosch.run import tensorboard as curve_files
from bosch.run.fingerprint import fingerprint
from bosch.run.plain_text import visible
from bosch.run.progress import say


def rebuild_tensorboard(run_path: Path) -> None:
    """Write all TensorBoard files of a run, from its metrics and scores."""
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
        scalar = {_tag(row): float(row["value"])}
        curves += curve_files.on_both_axes(row["step"], row["tokens"], scalar, when)
    to_shares: dict[str, float | None] = {}
    for recovery in compare([run]).recoveries:
        score = recovery.curve.score
        of = f"{score.suite}/{score.name} " if score.kind == "part" else f"{score.suite}/"
        for share, found in recovery.tokens_to.items():
            is_clear = recovery.has_clear_gap  # else it would say nothing
            to_shares[f"{of}tokens to {share:.0%}"] = found.value if is_clear else None
    reached = {tag: n for tag, n in to_shares.items() if n is not None and n != NEVER}
    step, tokens = max(((row["step"], row["tokens"]) for row in with_step), default=(0, 0))
    curves += curve_files.on_both_axes(step, tokens, reached, times.get(step))
    settings = _hparams(run)
    # The table's metrics are the last points of these curves.
    averages = sorted({_tag(row) for row in run.rows if row["task"] == AVERAGE})
    metrics = [hparams.Metric(tag) for tag in ("train/loss", *averages, *to_shares)]
    names = [hparams.HParam(name) for name in settings]
    # With a fixed time and name a run is the same row of the table however often it is written.
    table = (
        hparams.hparams_config_pb(names, metrics, time_created_secs=0.0),
        hparams.hparams_pb(settings, trial_id=visible(run.name), start_time_secs=0.0),
    )
    with curve_files.tolerating_write_errors(run_path):
        events = [Event(wall_time=time.time(), summary=summary) for summary in table]
        curve_files.replace_events(run_path / curve_files.FOLDER, [*events, *curves])
        _draw_dense_lines(run_path.parent / "shared", run.rows)


def _draw_dense_lines(shared: Path, rows: Sequence[Row]) -> None:
    """The dense model's scores, at the start and at the last step of all runs so far."""
    scalars = {_tag(row): float(row["value"]) for row in rows if row["step"] is None}
    if not scalars:
        return
    folder = shared / f"dense-{fingerprint(scalars)[:8]}"
    ends = [(row["step"], row["tokens"]) for row in rows if row["step"] is not None]
    step, tokens = max(ends, default=(0, 0))
    for event in curve_files.read_events(folder):
        if event.summary.value[0].tag.startswith(curve_files.BY_TOKENS):
            tokens = max(tokens, event.step)
        else:
            step = max(step, event.step)
    places = sorted({(0, 0), (step, tokens)})
    found = [e for place in places for e in curve_files.on_both_axes(*place, scalars, None)]
    curve_files.replace_events(folder, found)


def _tag(row: Row) -> str:
    names = (row["suite"], row["task"], row.get("length"), row["metric"])
    return "/".join(visible(name) for name in names if name)  # an average has no length


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
