"""The pictures of a comparison, for papers: recovery over tokens, scores before training. Bands and
bars are 95% intervals. The same numbers give the same bytes.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bosch.eval.report.compare import Comparison
from bosch.eval.report.lines import Line, dense_scores, lines_over_ratios, lines_over_training
from bosch.eval.report.statistics import Estimate
from bosch.eval.settings import SUITES
from bosch.eval.suites._reporting import ReportedScore, reporting_of
from bosch.masks.picture import write_picture
from bosch.plugins import list_plugins
from bosch.run.errors import UserError
from bosch.run.plain_text import picture_label

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3  # panels side by side
LEGEND_ROW = 0.19  # inches; two rows are part of every figure
COLORS = "#d95f02 #1b9e77 #7570b3 #e7298a #1f78b4 #66a61e #a6761d #e6ab02 #b2182b #666666".split()
LINES = ("-", "--", ":", "-.")


def draw_pictures(comparison: Comparison, out: Path) -> list[Path]:
    """Every picture that has something to show; those of an earlier comparison are deleted."""
    names = [*PICTURES]
    for suite in list_plugins(SUITES):
        with suppress(UserError):  # its file is broken
            names.append(parts_picture(suite))
    for name in names:
        (out / f"{name}.png").unlink(missing_ok=True)
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
    panels = [lines_over_ratios(comparison, score) for score in comparison.averages]
    if not panels or sum(len(line.y) for line in panels[0]) < 2:
        return None
    # The best on top, by the largest ratio that all methods have, where they differ most.
    first = {line.label: dict(zip(line.x["ratio"], line.y, strict=True)) for line in panels[0]}
    common = set.intersection(*(set(points) for points in first.values()))

    def sort_key(label: str) -> tuple[float, float]:
        ratio = max(common) if common else max(first[label])
        return ratio, first[label][ratio]

    place = {label: row for row, label in enumerate(sorted(first, key=sort_key))}
    ratios = sorted({ratio for lines in panels for line in lines for ratio in line.x["ratio"]})
    figure, axes = _grid(len(panels), height=1.0 + 0.2 * len(place))
    for number, (axis, score, lines) in enumerate(
        zip(axes, comparison.averages, panels, strict=True)
    ):
        for ratio, color in zip(ratios, itertools.cycle(COLORS)):
            dots = [
                (point.value, place[line.label], *_below_and_above(point))
                for line in lines
                for at, point in zip(line.x["ratio"], line.points, strict=True)
                if line.label in place and at == ratio
            ]
            if dots:
                x, y, *error = np.array(dots, float).T
                label = f"ratio {ratio:g}"
                axis.errorbar(x, y, xerr=error, fmt="o", color=color, ms=4, lw=1, label=label)
        _draw_dense(axis, dense_scores(comparison, score), vertical=True)
        axis.set(title=f"{score.title}, before training", xlabel="score (%)")
        names = [picture_label(label) for label in place] if number == 0 else []
        axis.set_yticks(range(len(place)), names or [""] * len(place), fontsize=8)
    return _finish(figure, axes)


# Figure 3 of the paper is the recovery over tokens.
PICTURES: dict[str, Callable[[Comparison], "Figure | None"]] = {
    "recovery": lambda comparison: _draw_scores(comparison, comparison.averages),
    "zero_shot": draw_zero_shot,
}


def parts_picture(suite: str) -> str:
    """Name of the picture of a suite's tasks or categories."""
    return f"{suite}_{reporting_of(suite).parts_title.replace(' ', '_')}"


# ------------------------------------------------------------------------------------- drawing


def _draw_scores(comparison: Comparison, scores: Sequence[ReportedScore]) -> "Figure | None":
    from matplotlib.ticker import EngFormatter

    panels = [(s, lines) for s in scores if (lines := list(lines_over_training(comparison, s)))]
    if not any(len(line.y) > 1 for _, lines in panels for line in lines):
        return None  # nothing was trained
    styles = _choose_styles(lines for _, lines in panels)
    figure, axes = _grid(len(panels))
    for axis, (score, lines) in zip(axes, panels, strict=True):
        _draw_lines(axis, lines, styles)
        _draw_dense(axis, dense_scores(comparison, score))
        axis.set(title=score.title, ylabel="score (%)", xlabel="training tokens")
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    return _finish(figure, axes)


def _grid(num_panels: int, height: float = 3.1) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure  # without pyplot, which keeps state and picks a display

    columns = min(COLUMNS, num_panels)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(4.2 * columns, height * rows + 0.5), dpi=130, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[num_panels:]:
        unused.remove()
    return figure, axes[:num_panels]


def _draw_lines(axis: "Axes", lines: Sequence[Line], styles: Mapping[str, tuple[str, str]]) -> None:
    for line in lines:
        (style, color), x = styles[line.label], line.x["tokens"]
        label = picture_label(line.label)
        axis.plot(x, line.y, style, color=color, marker="o", markersize=4, label=label)
        below, above = np.array([_below_and_above(point) for point in line.points]).T
        axis.fill_between(x, line.y - below, line.y + above, color=color, alpha=0.15, lw=0)


def _below_and_above(point: Estimate) -> tuple[float, float]:
    """How far the interval reaches; nan: unknown."""
    if point.value is None or point.low is None or point.high is None:
        return math.nan, math.nan
    return point.value - point.low, point.high - point.value


def _choose_styles(panels: Iterable[Sequence[Line]]) -> dict[str, tuple[str, str]]:
    """A line style and color for each label, the same in all panels."""
    labels = dict.fromkeys(line.label for lines in panels for line in lines)
    looks = itertools.cycle((style, color) for style in LINES for color in COLORS)
    return dict(zip(labels, looks, strict=False))


def _draw_dense(axis: "Axes", heights: Mapping[str, float], vertical: bool = False) -> None:
    draw = axis.axvline if vertical else axis.axhline
    for label, height in heights.items():
        label = picture_label(label)
        draw(height, color="#444444", linewidth=1, linestyle=(0, (6, 2)), label=label)


def _finish(figure: "Figure", axes: "Sequence[Axes]") -> "Figure":
    labels: dict[str, Artist] = {}
    for axis in axes:
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    longest = 0.5 + 0.057 * max(map(len, labels), default=0)  # inches, with the line beside it
    columns = max(1, min(len(labels), int(figure.get_figwidth() / longest)))
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + max(0, rows - 2) * LEGEND_ROW)
    figure.legend(
        list(labels.values()),
        list(labels),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8,
    )
    return figure
