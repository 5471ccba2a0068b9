"""The pictures of a comparison: recovery over tokens, FLOPs and hours, scores over ratios, losses,
masks. The same numbers give the same bytes.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bosch.eval.report.compare import Comparison, seed_means
from bosch.eval.report.runs import RunResults
from bosch.eval.report.statistics import Numbers
from bosch.eval.settings import SUITES
from bosch.eval.suites._reporting import ReportedScore, reporting_of
from bosch.masks.picture import FULL_COLOR, WINDOW_COLOR, write_picture
from bosch.plugins import list_plugins
from bosch.run.plain_text import picture_label

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3  # panels side by side
COLORS = "#d95f02 #1b9e77 #7570b3 #e7298a #1f78b4 #66a61e #a6761d #e6ab02 #b2182b #666666".split()
LINES = ("-", "--", ":", "-.")
MOST_MASKS = 24  # in one picture


@dataclass(frozen=True)
class Line:
    """A run, or the mean over the seeds of a setup, with a band of one standard error."""

    label: str
    x: Numbers
    y: Numbers
    error: Numbers  # nan: unknown


def draw_pictures(comparison: Comparison, out: Path) -> list[Path]:
    """Every picture that has something to show; those of an earlier comparison are deleted."""
    for name in (*PICTURES, *(f"{suite}_*" for suite in list_plugins(SUITES))):
        for old in out.glob(f"{name}.png"):
            old.unlink()
    written = []
    parts: dict[str, Callable[[Comparison], Figure | None]] = {
        parts_picture(suite): partial(_draw_scores, scores=comparison.parts(suite))
        for suite in comparison.suites
    }
    for name, draw in (PICTURES | parts).items():
        figure = draw(comparison)
        path = out / f"{name}.png"
        if figure is not None:
            write_picture(figure, path)
            written.append(path)
    return written


def draw_zero_shot(comparison: Comparison) -> "Figure | None":
    """Tables 1 and 2 of the paper as a picture: scores before training, a row per method, a dot per
    ratio."""
    panels = [_over_ratios(comparison, score) for score in comparison.averages]
    if not panels or sum(map(len, panels[0].values())) < 2:
        return None
    # The best on top, by the largest ratio that all methods have, where they differ most.
    common = set.intersection(*(set(points) for points in panels[0].values()))

    def sort_key(label: str) -> tuple[float, float]:
        points = panels[0][label]
        ratio = max(common) if common else max(points)
        return ratio, points[ratio][0]

    place = {label: row for row, label in enumerate(sorted(panels[0], key=sort_key))}
    ratios = sorted({ratio for lines in panels for points in lines.values() for ratio in points})
    figure, axes = _grid(len(panels), height=1.0 + 0.2 * len(place))
    for number, (axis, score, lines) in enumerate(
        zip(axes, comparison.averages, panels, strict=True)
    ):
        for ratio, color in zip(ratios, itertools.cycle(COLORS)):
            dots = [(*lines[n][ratio], place[n]) for n in lines if n in place and ratio in lines[n]]
            if dots:
                x, error, y = np.array(dots).T
                label = f"ratio {ratio:g}"
                axis.errorbar(x, y, xerr=error, fmt="o", color=color, ms=4, lw=1, label=label)
        _draw_dense(axis, comparison, score, vertical=True)
        axis.set(title=f"{score.title}, before training", xlabel="score (%)")
        names = [picture_label(label) for label in place] if number == 0 else []
        axis.set_yticks(range(len(place)), names or [""] * len(place), fontsize=8)
    return _finish(figure, axes)


def draw_losses(comparison: Comparison) -> "Figure | None":
    panels = []
    for name, title in (("loss", "training loss"), ("validation_loss", "validation loss")):
        lines = list(_losses(comparison.runs, name))
        if lines:
            panels.append((title, lines))
    if not panels:
        return None
    styles = _choose_styles(lines for _, lines in panels)
    figure, axes = _grid(len(panels))
    for axis, (title, lines) in zip(axes, panels, strict=True):
        _draw_lines(axis, lines, styles, marker="" if title == "training loss" else "o")
        axis.set(title=title, ylabel="nats per token")
        for height in {run.dense_validation_loss for run in comparison.runs}:
            if title == "validation loss" and height is not None:
                axis.axhline(height, color="#444444", lw=1, ls=(0, (6, 2)), label="dense model")
        _label_axis(axis)
    return _finish(figure, axes)


def draw_masks(comparison: Comparison) -> "Figure | None":
    """Heat maps side by side, the first layer at the bottom."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    runs = [run for run in comparison.runs if run.mask is not None][:MOST_MASKS]
    if not runs:
        return None
    masks = [run.mask.mask for run in runs if run.mask is not None]
    height = max(1.6, 0.14 * max(mask.num_layers for mask in masks))
    figure, axes = _grid(len(runs), columns=min(6, len(runs)), width=2.2, height=height + 0.7)
    colors = ListedColormap([WINDOW_COLOR, FULL_COLOR])
    for axis, run, mask in zip(axes, runs, masks, strict=True):
        axis.pcolormesh(mask.z, cmap=colors, vmin=0, vmax=1, edgecolors="white", linewidth=0.5)
        axis.set_title(f"{picture_label(run.name)}\n{mask.ratio:.4g} windowed", fontsize=7)
        axis.set_xlabel("group", fontsize=7)
        axis.set_ylabel("layer", fontsize=7)
        counts = (axis.set_xticks, mask.num_groups), (axis.set_yticks, mask.num_layers)
        for ticks, count in counts:
            shown = range(0, count, max(1, -(-count // 8)))
            ticks([place + 0.5 for place in shown], [str(place) for place in shown], fontsize=6)
    keys = [
        Patch(color=FULL_COLOR, label="full attention"),
        Patch(color=WINDOW_COLOR, label="sliding window"),
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


# Figure 3 of the paper is the recovery over tokens.
PICTURES: dict[str, Callable[[Comparison], "Figure | None"]] = {
    "recovery": lambda comparison: _draw_scores(comparison, comparison.averages),
    "recovery_flops": lambda comparison: _draw_scores(comparison, comparison.averages, "flops"),
    "recovery_hours": lambda comparison: _draw_scores(comparison, comparison.averages, "hours"),
    "zero_shot": draw_zero_shot,
    "losses": draw_losses,
    "masks": draw_masks,
}


def parts_picture(suite: str) -> str:
    """Name of the picture of a suite's tasks or categories."""
    return f"{suite}_{reporting_of(suite).parts_title.replace(' ', '_')}"


# ---------------------------------------------------------------------------------------- lines


def _draw_scores(
    comparison: Comparison, scores: Sequence[ReportedScore], over: str = "tokens"
) -> "Figure | None":
    panels = [(s, lines) for s in scores if (lines := list(_over_training(comparison, s, over)))]
    # By FLOPs and hours runs are compared; one run has the same curve, and hours of its own.
    if not panels or (over != "tokens" and len(comparison.runs) == 1):
        return None
    styles = _choose_styles(lines for _, lines in panels)
    figure, axes = _grid(len(panels))
    for axis, (score, lines) in zip(axes, panels, strict=True):
        _draw_lines(axis, lines, styles)
        _draw_dense(axis, comparison, score)
        axis.set(title=score.title, ylabel="score (%)")
        _label_axis(axis, over)
    return _finish(figure, axes)


def _over_training(comparison: Comparison, score: ReportedScore, over: str) -> Iterator[Line]:
    """A line per setup. Untrained runs are left out if any run was trained. over: tokens, or what
    the training has used up by then: flops, hours."""
    setups: dict[str, list[RunResults]] = {}
    curves = {run.name: comparison.curve(run.name, score) for run in comparison.runs}
    any_trained = any(curve and curve.is_trained for curve in curves.values())
    for run in comparison.runs:
        curve = curves[run.name]
        if curve is not None and (curve.is_trained or not any_trained):
            setups.setdefault(run.setup, []).append(run)
    shown = [run for runs in setups.values() for run in runs]
    only_methods = len({(run.model, run.ratio, run.window, run.differences) for run in shown}) == 1
    for setup, runs in setups.items():
        members = [curve for run in runs if (curve := curves[run.name])]
        place: Callable[[Any], float] = float
        if over != "tokens":
            spent = runs[0].spent(over)
            if not all(tokens in spent for tokens in members[0].tokens):
                continue
            place = spent.__getitem__
        if len(members) == 1:
            x = np.array([place(t) for t in members[0].tokens])
            yield Line(runs[0].name, x, members[0].values, members[0].stderrs)
            continue
        common = sorted(set.intersection(*(set(curve.tokens) for curve in members)))
        heights = np.array(
            [[curve.values[list(curve.tokens).index(t)] for t in common] for curve in members]
        )
        if common:
            error = heights.std(axis=0, ddof=1) / math.sqrt(len(members))
            name = runs[0].method if only_methods else setup
            label = f"{name} (mean of {len(members)} seeds)"
            yield Line(label, np.array([place(t) for t in common]), heights.mean(axis=0), error)


def _over_ratios(
    comparison: Comparison, score: ReportedScore
) -> dict[str, dict[float, tuple[float, float]]]:
    """Mean score before training and its error, by method and ratio."""
    by_name = {run.name: run for run in comparison.runs}
    one_model = len({run.model for run in comparison.runs}) == 1
    one_window = len({run.window for run in comparison.runs}) == 1
    points: dict[str, dict[float, tuple[float, float]]] = {}
    for mean in seed_means(comparison, score, at_end=False):
        run = by_name[mean.runs[0]]
        if run.ratio:
            label = run.method if one_model else f"{run.model} {run.method}"
            label += "" if one_window else f" W{run.window}"
            label += f", {run.differences}" if run.differences else ""
            points.setdefault(label, {})[run.ratio] = mean.mean, mean.stderr
    return points


def _losses(runs: Sequence[RunResults], name: str) -> Iterator[Line]:
    for run in runs:
        points = [
            (row["tokens"], row[name])
            for row in run.training
            if isinstance(row.get(name), int | float) and isinstance(row.get("tokens"), int)
        ]
        if points:
            x, y = np.array(points, float).T
            yield Line(run.name, x, y, np.full(len(x), math.nan))


# ------------------------------------------------------------------------------------- drawing


def _grid(
    num_panels: int, columns: int = COLUMNS, width: float = 4.2, height: float = 3.1
) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure  # without pyplot, which keeps state and picks a display

    columns = min(columns, num_panels)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(width * columns, height * rows + 0.5), dpi=130, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[num_panels:]:
        unused.remove()
    return figure, axes[:num_panels]


def _draw_lines(
    axis: "Axes", lines: Sequence[Line], styles: Mapping[str, tuple[str, str]], marker: str = "o"
) -> None:
    for line in lines:
        style, color = styles[line.label]
        label = picture_label(line.label)
        axis.plot(line.x, line.y, style, color=color, marker=marker, markersize=4, label=label)
        if not np.isnan(line.error).any():
            axis.fill_between(
                line.x, line.y - line.error, line.y + line.error, color=color, alpha=0.15, lw=0
            )


def _choose_styles(panels: Iterable[Sequence[Line]]) -> dict[str, tuple[str, str]]:
    """A line style and color for each label, the same in all panels."""
    labels = dict.fromkeys(line.label for lines in panels for line in lines)
    looks = itertools.cycle((style, color) for style in LINES for color in COLORS)
    return dict(zip(labels, looks, strict=False))


def _draw_dense(
    axis: "Axes", comparison: Comparison, score: ReportedScore, vertical: bool = False
) -> None:
    """A line for each dense model. Runs of one model share it."""
    draw = axis.axvline if vertical else axis.axhline
    heights: dict[str, float] = {}
    for run in comparison.runs:
        value = comparison.dense_value(run.name, score)
        if value is not None:
            heights.setdefault(run.model, value.value)
    for model, height in heights.items():
        label = "dense model" if len(heights) == 1 else f"dense {picture_label(model)}"
        draw(height, color="#444444", linewidth=1, linestyle=(0, (6, 2)), label=label)


def _finish(figure: "Figure", axes: "Sequence[Axes]") -> "Figure":
    labels: dict[str, Artist] = {}
    for axis in axes:
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    figure.legend(
        list(labels.values()),
        list(labels),
        loc="outside lower center",
        ncols=min(len(labels), max(1, len(axes))),
        frameon=False,
        fontsize=8,
    )
    return figure


def _label_axis(axis: "Axes", over: str = "tokens") -> None:
    from matplotlib.ticker import EngFormatter

    axis.set_xlabel("FLOPs of the training" if over == "flops" else f"training {over}")
    if over != "hours":
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
