"""The lines of charts, in the page and in pictures: scores over training or over ratios, losses.

`charts` gives them to eval/report/report.js.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bosch.eval.report import statistics
from bosch.eval.report.cells import show_estimate, show_points
from bosch.eval.report.compare import Comparison, seed_means
from bosch.eval.report.runs import RunResults
from bosch.eval.report.statistics import Curve, Estimate, Numbers, estimate_mean
from bosch.eval.suites._reporting import ReportedScore, reporting_of
from bosch.run.plain_text import visible

LOSSES = {"validation_loss": "validation loss", "loss": "training loss"}
MOST_POINTS = 200  # of a line in a page; the points of a longer one are averaged


@dataclass(frozen=True)
class Line:
    """A run, or the mean over the seeds of a setup."""

    label: str
    x: Mapping[str, Numbers]  # by axis: `ratio`, or `tokens` and, where known, `flops`, `hours`
    points: Sequence[Estimate]  # of scores with 95% intervals

    @property
    def y(self) -> Numbers:
        return np.array([point.value for point in self.points], float)


def charts(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """What eval/report/report.js draws, the most important first."""
    for score in sorted(comparison.scores, key=lambda score: score.kind):  # averages first
        if score.kind == "variant":
            continue
        reporting, dense = reporting_of(score.suite), dense_scores(comparison, score)
        lines = list(lines_over_training(comparison, score))
        if any(len(line.y) > 1 for line in lines):
            is_part = score.kind == "part"
            group = f"{reporting.title} {reporting.parts_title}" if is_part else "averages"
            yield _chart(group, score.full_title, "%", lines, dense)
        lines = lines_over_ratios(comparison, score) if score.kind == "average" else []
        if sum(len(line.y) for line in lines) > 1:
            title = f"{score.title}, before training"
            yield _chart("before training", title, "%", lines, dense)
    for name, title in LOSSES.items():
        if lines := loss_lines(comparison.runs, name):
            dense = dense_losses(comparison.runs) if name == "validation_loss" else {}
            yield _chart("losses", title, "nats per token", lines, dense)


def _chart(
    group: str, title: str, unit: str, lines: Iterable[Line], dense: Mapping[str, float]
) -> dict[str, Any]:
    heights = {visible(label): height for label, height in dense.items()}
    named = {"group": visible(group), "title": visible(title), "unit": unit}
    return named | {"lines": [_drawn_line(line, unit) for line in lines], "dense": heights}


def _drawn_line(line: Line, unit: str) -> dict[str, Any]:
    count = min(len(line.points), MOST_POINTS)

    def thinned(values: Numbers) -> list[float]:
        return [float(f"{part.mean():.6g}") for part in np.array_split(values, count)]

    points = line.points if unit == "%" else [Estimate(loss) for loss in thinned(line.y)]
    write = show_points if unit == "%" else "{:.4f}".format
    return {
        "name": visible(line.label),
        "x": {axis: thinned(values) for axis, values in line.x.items()},
        "y": [point.value for point in points],
        "low": [point.low for point in points],
        "high": [point.high for point in points],
        "shown": [show_estimate(point, write) for point in points],
    }


def lines_over_training(comparison: Comparison, score: ReportedScore) -> Iterator[Line]:
    """A line per setup. Untrained runs are left out if any run was trained."""
    known = comparison.curves_of(score)
    shown = [pair for pair in known if pair[1].is_trained] or known
    setups: dict[str, list[tuple[RunResults, Curve]]] = {}
    for run, curve in shown:
        setups.setdefault(run.setup, []).append((run, curve))
    kinds = {(run.model, run.ratio, run.window, run.differences) for run, _ in shown}
    for setup, members in setups.items():
        run, curves = members[0][0], [curve for _, curve in members]
        label = run.name
        if len(curves) > 1:
            name = run.method if len(kinds) == 1 else setup
            label = f"{name} (mean of {len(curves)} seeds)"
        common = sorted(set.intersection(*(set(curve.tokens) for curve in curves)))
        if common:
            points = [estimate_mean(curves, statistics.value_after(tokens)) for tokens in common]
            yield Line(label, _axes(run, common), points)


def lines_over_ratios(comparison: Comparison, score: ReportedScore) -> list[Line]:
    """Scores before training: a line per method."""
    one_model = len({run.model for run in comparison.runs}) == 1
    one_window = len({run.window for run in comparison.runs}) == 1
    points: dict[str, dict[float, Sequence[Curve]]] = {}
    for mean in seed_means(comparison, score, at_end=False):
        run = mean.runs[0]
        if run.ratio:
            label = run.method if one_model else f"{run.model} {run.method}"
            label += "" if one_window else f" W{run.window}"
            label += f", {run.differences}" if run.differences else ""
            points.setdefault(label, {})[run.ratio] = mean.curves
    lines = []
    for label, by_ratio in points.items():
        ratios = sorted(by_ratio)
        starts = [estimate_mean(by_ratio[ratio], statistics.value_at(0)) for ratio in ratios]
        lines.append(Line(label, {"ratio": np.array(ratios)}, starts))
    return lines


def loss_lines(runs: Sequence[RunResults], name: str) -> list[Line]:
    """A line per run."""
    lines = []
    for run in runs:
        points = [
            (row["tokens"], row[name])
            for row in run.training
            if isinstance(row.get(name), int | float) and isinstance(row.get("tokens"), int)
        ]
        if points:
            x = _axes(run, [tokens for tokens, _ in points])
            lines.append(Line(run.name, x, [Estimate(loss) for _, loss in points]))
    return lines


def _axes(run: RunResults, tokens: Sequence[float]) -> dict[str, Numbers]:
    """What the training had used up when it had seen so many tokens."""
    x = {"tokens": np.array(tokens, float)}
    for axis in ("flops", "hours"):
        spent = run.spent(axis)
        if all(count in spent for count in tokens):
            x[axis] = np.array([spent[int(count)] for count in tokens])
    return x


def dense_scores(comparison: Comparison, score: ReportedScore) -> dict[str, float]:
    """By label, of each dense model. Runs of one model share it."""
    scores: dict[str, float] = {}
    for run in comparison.runs:
        value = comparison.dense_value(run.name, score)
        if value is not None:
            scores.setdefault(run.model, value.value)
    return _name_dense(scores)


def dense_losses(runs: Sequence[RunResults]) -> dict[str, float]:
    """The same for the validation loss. Runs with other held-out texts have one of their own."""
    first = {run.dense_validation_loss: run.name for run in reversed(runs)}
    return _name_dense({name: loss for loss, name in first.items() if loss is not None})


def _name_dense(heights: Mapping[str, float]) -> dict[str, float]:
    many = len(heights) > 1
    return {f"dense {name}" if many else "dense model": y for name, y in heights.items()}
