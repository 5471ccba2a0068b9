"""The curves of a comparison: scores and losses over training, scores over ratios before it.

`make_charts` says which panels there are. `draw_panel` draws one for a picture, which has all
panels of a chart side by side; `place_panel` says where its parts are, for the SVG of the page.
Bands and bars are 95% intervals. The same numbers give the same bytes.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bosch.eval.report import intervals
from bosch.eval.report.compare import Comparison, by_setup, seeds_of_setups
from bosch.eval.report.intervals import Estimate, Numbers
from bosch.eval.report.runs import RunResults
from bosch.eval.report.tables import show_estimate, show_points, show_tokens
from bosch.eval.settings import SUITES
from bosch.eval.suites._reporting import ReportedScore, reporting_of
from bosch.masks.picture import write_picture
from bosch.plugins import list_plugins
from bosch.run.errors import UserError
from bosch.run.plain_text import picture_label, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = {
    "tokens": "training tokens",
    "flops": "FLOPs of the training",
    "hours": "hours of training, without evaluations",
    "ratio": "share of groups on the window",
}
MOST_POINTS = 200  # of a line; the points of a longer one are averaged
MOST_BANDS = 6  # lines with bands in a panel; more of them would cover each other
MOST_MARKERS = 60  # points of a line with markers
COLUMNS = 3  # panels side by side in a picture
PANEL = (3.9, 2.9)  # inches
LEGEND_ROW = 0.19  # inches
# report.css has the same colors, for a light and a dark page.
COLORS = "#d95f02 #1f6fb2 #1b9e77 #c2187a #7a5cc9 #8a6d00 #0aa3b5 #a3231f #4d7d16 #5b6470".split()
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^"
INK = "#1d2126"


@dataclass(frozen=True)
class Line:
    """A run, or the mean over the seeds of a setup."""

    label: str
    x: Numbers
    points: Sequence[Estimate]  # of scores with 95% intervals
    shift: float = 0.0  # to where it is drawn, beside other lines with the same x

    @property
    def y(self) -> Numbers:
        return np.array([point.value for point in self.points], float)

    @property
    def intervals(self) -> Numbers:
        """[place, low, high] of the points whose interval is known."""
        points = zip(self.x + self.shift, self.points, strict=True)
        known = [(x, point.low, point.high) for x, point in points if point.low is not None]
        return np.array(known, float).reshape(-1, 3).T


@dataclass(frozen=True)
class Panel:
    title: str
    axis: str  # one of AXES
    lines: Sequence[Line]
    dense: Mapping[str, float]  # label -> height of a dense model
    is_loss: bool = False

    def show(self, value: float) -> str:
        return f"{value:.4f}" if self.is_loss else show_points(value)

    @property
    def unit(self) -> str:
        return "nats per token" if self.is_loss else "score (%)"

    def has_bars(self, line: Line) -> bool:
        return self.axis == "ratio" or len(line.points) == 1

    def has_band(self, line: Line) -> bool:
        return len(self.lines) <= MOST_BANDS and not self.has_bars(line) and line.intervals.size > 0

    @property
    def has_something(self) -> bool:
        """A line, or two dots that can be compared."""
        counts = [len(line.points) for line in self.lines]
        return (sum(counts) if self.axis == "ratio" else max(counts, default=0)) > 1


@dataclass(frozen=True)
class Chart:
    """Panels that are shown together."""

    name: str | None  # of its picture; None: it is in the page only
    title: str
    panels: Sequence[Panel]

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(line.label for panel in self.panels for line in panel.lines))


def make_charts(comparison: Comparison) -> list[Chart]:
    """All that have something to show, the most important first. Figure 3 of the paper is the
    recovery over tokens; its tables 1 and 2 are the scores before training."""
    charts = []
    for axis, name in (("tokens", "recovery"), ("flops", None), ("hours", None)):
        panels = [_over_training(comparison, score, axis) for score in comparison.averages]
        charts.append(Chart(name, f"averages over {AXES[axis]}", panels))
    panels = [_over_ratios(comparison, score) for score in comparison.averages]
    charts.append(Chart("zero_shot", "averages before training", panels))
    for suite in comparison.suites:
        panels = [_over_training(comparison, score, "tokens") for score in comparison.parts(suite)]
        title = f"{reporting_of(suite).title} {reporting_of(suite).parts_title}"
        charts.append(Chart(parts_picture(suite), title, panels))
    losses = {"validation_loss": "validation loss", "loss": "training loss"}
    panels = [_losses(comparison.runs, name, title) for name, title in losses.items()]
    charts.append(Chart("losses", "losses", panels))
    charts = [replace(chart, panels=[p for p in chart.panels if p.lines]) for chart in charts]
    return [chart for chart in charts if any(panel.has_something for panel in chart.panels)]


def parts_picture(suite: str) -> str:
    """Name of the picture of a suite's tasks or categories."""
    return f"{suite}_{reporting_of(suite).parts_title.replace(' ', '_')}"


def choose_styles(charts: Sequence[Chart]) -> dict[str, int]:
    """A number for each label, the same in all charts: it chooses color, dashes and marker."""
    labels = dict.fromkeys(label for chart in charts for label in chart.labels)
    return {label: number for number, label in enumerate(labels)}


# ---------------------------------------------------------------------------------------- panels


def _over_training(comparison: Comparison, score: ReportedScore, axis: str) -> Panel:
    """A line per setup. Untrained runs are left out if any run was trained."""
    known = comparison.curves_of(score)
    lines = []
    for setup, curves in by_setup([curve for curve in known if curve.is_trained] or known).items():
        run, num_seeds = curves[0].run, len(curves)
        tokens = sorted(set.intersection(*(set(curve.tokens) for curve in curves)))
        spent = {count: count for count in tokens} if axis == "tokens" else run.spent(axis)
        if tokens and all(count in spent for count in tokens):
            label = run.name if num_seeds == 1 else f"{setup} (mean of {num_seeds} seeds)"
            points = [intervals.estimate(curves, intervals.value_after(n)) for n in tokens]
            lines.append(Line(label, np.array([spent[n] for n in tokens], float), points))
    return Panel(score.title, axis, lines, _dense_scores(comparison, score))


def _over_ratios(comparison: Comparison, score: ReportedScore) -> Panel:
    """Scores before training: a line per method."""
    starts: dict[str, dict[float, Estimate]] = {}
    for curves in seeds_of_setups(comparison, score, at_end=False).values():
        run, settings = curves[0].run, curves[0].run.settings
        if settings["ratio"]:
            label = f"{settings['model']} {run.method} W{settings['window']}"
            start = intervals.estimate(curves, intervals.value_at(0))
            label += run.described_differences
            starts.setdefault(label, {})[settings["ratio"]] = start
    lines = []
    for number, (label, by_ratio) in enumerate(starts.items(), 1):
        ratios, shift = sorted(by_ratio), 0.03 * (number / (len(starts) + 1) - 0.5)
        lines.append(Line(label, np.array(ratios), [by_ratio[r] for r in ratios], shift))
    title = f"{score.title}, before training"
    return Panel(title, "ratio", lines, _dense_scores(comparison, score))


def _losses(runs: Sequence[RunResults], name: str, title: str) -> Panel:
    """A line per run. Runs with other held-out texts have a dense loss of their own."""
    lines: list[Line] = []
    dense: dict[str, Any] = {}
    for run in runs:
        rows = [row for row in run.training if isinstance(row.get(name), int | float)]
        if rows:
            points = np.array([(row["tokens"], row[name]) for row in rows], float)
            parts = np.array_split(points, min(len(points), MOST_POINTS))
            x, means = np.array([part.mean(0) for part in parts]).T
            lines.append(Line(run.name, x, [Estimate(loss) for loss in means]))
        loss = run.training[0].get("dense_validation_loss") if run.training else None
        if name == "validation_loss" and loss not in (None, *dense.values()):
            dense[run.name] = loss
    return Panel(title, "tokens", lines, _name_dense(dense), is_loss=True)


def _dense_scores(comparison: Comparison, score: ReportedScore) -> dict[str, float]:
    """By label, of each dense model. Runs of one model share it."""
    heights: dict[str, float] = {}
    for run in comparison.runs:
        if None in (points := comparison.curve(run, score).points):
            heights.setdefault(run.settings["model"], points[None].value)
    return _name_dense(heights)


def _name_dense(heights: Mapping[str, float]) -> dict[str, float]:
    many = len(heights) > 1
    return {f"dense {name}" if many else "dense model": y for name, y in heights.items()}


# --------------------------------------------------------------------------------------- drawing


def draw_panel(axes: "Axes", panel: Panel, styles: Mapping[str, int]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for line in panel.lines:
        style = styles[line.label]
        color, dashes = COLORS[style % len(COLORS)], DASHES[style // len(COLORS) % len(DASHES)]
        marker = MARKERS[style % len(MARKERS)] if len(line.x) < MOST_MARKERS else ""
        look: dict[str, Any] = {"color": color, "marker": marker, "ms": 4, "lw": 1.5}
        axes.plot(line.x + line.shift, line.y, dashes, label=picture_label(line.label), **look)
        if panel.has_bars(line):
            axes.vlines(*line.intervals, color=color, alpha=0.5, lw=1.5)
        elif panel.has_band(line):
            axes.fill_between(*line.intervals, color=color, alpha=0.13, lw=0)
    for label, height in panel.dense.items():
        axes.axhline(height, color=INK, alpha=0.6, lw=1, ls=(0, (6, 2)))
        text = picture_label(f"{label} {panel.show(height)}")
        # On the side of the line that curves reach last.
        side, points = ("bottom", 3) if panel.is_loss else ("top", -3)
        place: Any = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
        axes.annotate(text, (0.01, height), (0, points), va=side, alpha=0.8, **place)
    axes.set(title=picture_label(panel.title), xlabel=AXES[panel.axis], ylabel=panel.unit)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    if panel.axis == "ratio":
        axes.set_xticks(sorted({ratio for line in panel.lines for ratio in line.x}))
    if panel.axis in ("tokens", "flops"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)


def draw_picture(chart: Chart, styles: Mapping[str, int]) -> "Figure":
    """For papers: all panels side by side, with one legend below."""
    from matplotlib.figure import Figure  # without pyplot, which keeps state and picks a display

    columns = min(COLUMNS, len(chart.panels))
    rows, width = math.ceil(len(chart.panels) / columns), PANEL[0] * columns
    longest = 0.5 + 0.057 * max(map(len, chart.labels))  # inches, with the line beside it
    across = max(1, int(width / longest))  # names in a row of the legend
    height = PANEL[1] * rows + 0.2 + LEGEND_ROW * math.ceil(len(chart.labels) / across)
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    handles: dict[str, Any] = {}
    for place, panel in enumerate(chart.panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        draw_panel(axes, panel, styles)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    style: Any = {"loc": "outside lower center", "ncols": across, "frameon": False, "fontsize": 8}
    figure.legend([*handles.values()], [*handles], **style)
    return figure


def draw_pictures(charts: Sequence[Chart], out: Path) -> list[Path]:
    """A picture of each chart. Those of an earlier comparison are deleted."""
    names = ["recovery", "zero_shot", "losses"]
    for suite in list_plugins(SUITES):
        with suppress(UserError):  # its file is broken
            names.append(parts_picture(suite))
    for name in names:
        (out / f"{name}.png").unlink(missing_ok=True)
    styles = choose_styles(charts)
    pictures = {out / f"{chart.name}.png": chart for chart in charts if chart.name is not None}
    for path, chart in pictures.items():
        write_picture(draw_picture(chart, styles), path)
    return list(pictures)


def place_panel(panel: Panel, styles: Mapping[str, int]) -> dict[str, Any]:
    """Where the parts of a panel are in an SVG of the size PANEL, in points from the upper left
    corner, and what there is to say of each of its points."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=PANEL, dpi=72).add_axes((0.15, 0.17, 0.83, 0.73))
    draw_panel(axes, panel, styles)  # chooses the range and the ticks
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()

    def at(x: Any, y: Any) -> list[tuple[float, float]]:
        pixels = axes.transData.transform(np.column_stack(np.broadcast_arrays(x, y)))
        return [(round(px, 1), round(72 * PANEL[1] - py, 1)) for px, py in pixels.tolist()]

    def ticks(axis: Any, low: float, high: float) -> list[tuple[float, str]]:
        shown = [tick for tick in axis.get_majorticklocs() if low <= tick <= high]
        return list(zip(shown, axis.get_major_formatter().format_ticks(shown), strict=True))

    lines, points = [], []
    for line in panel.lines:
        number, curve = styles[line.label], at(line.x + line.shift, line.y)
        known, low, high = line.intervals
        lows, highs = at(known, low), at(known, high)
        bars = list(zip(lows, highs, strict=True)) if panel.has_bars(line) else []
        band = [*lows, *reversed(highs)] if panel.has_band(line) else []
        lines.append((number, curve, len(curve) < MOST_MARKERS, bars, band))
        for place, x, point in zip(curve, line.x, line.points, strict=True):
            changes = [(point.value or 0.0) - height for height in panel.dense.values()]
            shown = [f"{'−' if c < 0 else '+'}{panel.show(abs(c))}" for c in changes]
            where = show_tokens(x) if panel.axis == "tokens" else f"{x:.3g}"
            points.append([*place, number, show_estimate(point, panel.show), where, *shown])
    tips = {"title": visible(panel.title), "axis": AXES[panel.axis], "points": points}
    return {
        "box": [*at(left, top)[0], *at(right, bottom)[0]],
        "x_ticks": [(at(x, top)[0][0], label) for x, label in ticks(axes.xaxis, left, right)],
        "y_ticks": [(at(left, y)[0][1], label) for y, label in ticks(axes.yaxis, bottom, top)],
        "dense": [(at(left, y)[0][1], name, panel.show(y)) for name, y in panel.dense.items()],
        "lines": lines,
        "tips": tips | {"dense": [visible(name) for name in panel.dense]},
    }
