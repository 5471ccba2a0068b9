"""The curves of a comparison: scores and losses over training, scores over ratios before it.

`make_charts` says which panels there are. `draw_panel` draws one; the page has each as SVG, which
report.js lets answer to the pointer, and pictures for papers have all panels of a chart side by
side. Bands and bars are 95% intervals. The same numbers give the same bytes.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bosch.eval.report import intervals
from bosch.eval.report.compare import Comparison, seeds_of_setups
from bosch.eval.report.intervals import Curve, Estimate, Numbers
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
LOSSES = {"validation_loss": "validation loss", "loss": "training loss"}
MOST_POINTS = 200  # of a line; the points of a longer one are averaged
MOST_BANDS = 6  # lines with bands in a panel; more of them would cover each other
COLUMNS = 3  # panels side by side in a picture
PANEL = (3.9, 2.9)  # inches
LEGEND_ROW = 0.19  # inches
# report.css has the same colors, for a light and a dark page.
COLORS = "#d95f02 #1f6fb2 #1b9e77 #c2187a #7a5cc9 #8a6d00 #0aa3b5 #a3231f #4d7d16 #5b6470".split()
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^"
INK = "#1d2126"
# Of matplotlib's SVG, what a page needs not, or would load something by.
NOT_IN_A_PAGE = re.compile(
    r"<metadata>.*?</metadata>|<defs>\s*<(?:style|clipPath).*?</defs>|\n\s*|xlink:(?=href)"
    r'| clip-path="[^"]*"| xmlns(?::\w+)?="[^"]*"| id="(?!line-|m\w{10}")[^"]*"'
    r'| transform="rotate\(-0 [^"]*"|font-family: [^;]*; ',
    re.DOTALL,
)


@dataclass(frozen=True)
class Line:
    """A run, or the mean over the seeds of a setup."""

    label: str
    x: Numbers
    points: Sequence[Estimate]  # of scores with 95% intervals

    @property
    def y(self) -> Numbers:
        return np.array([point.value for point in self.points], float)


@dataclass(frozen=True)
class Panel:
    title: str
    axis: str  # one of AXES
    lines: Sequence[Line]
    dense: Mapping[str, float]  # label -> height of a dense model
    is_loss: bool = False

    def show(self, value: float) -> str:
        return f"{value:.4f}" if self.is_loss else show_points(value)

    def show_place(self, x: float) -> str:
        return f"{AXES[self.axis]}: {show_tokens(x) if self.axis == 'tokens' else f'{x:.3g}'}"

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


def make_charts(comparison: Comparison) -> list[Chart]:
    """All that have something to show, the most important first. Figure 3 of the paper is the
    recovery over tokens; its tables 1 and 2 are the scores before training."""
    charts = []
    for axis, name in (("tokens", "recovery"), ("flops", None), ("hours", None)):
        panels = list(_over_training(comparison, comparison.averages, axis))
        charts.append(Chart(name, f"averages over {AXES[axis]}", panels))
    panels = [
        Panel(f"{score.title}, before training", "ratio", lines, _dense_scores(comparison, score))
        for score in comparison.averages
        if (lines := _lines_over_ratios(comparison, score))
    ]
    charts.append(Chart("zero_shot", "averages before training", panels))
    for suite in comparison.suites:
        reporting = reporting_of(suite)
        panels = list(_over_training(comparison, comparison.parts(suite), "tokens"))
        title = f"{reporting.title} {reporting.parts_title}"
        charts.append(Chart(parts_picture(suite), title, panels))
    panels = [
        Panel(title, "tokens", lines, _dense_losses(comparison.runs, name), is_loss=True)
        for name, title in LOSSES.items()
        if (lines := list(_loss_lines(comparison.runs, name)))
    ]
    charts.append(Chart(None, "losses", panels))
    return [chart for chart in charts if any(panel.has_something for panel in chart.panels)]


def parts_picture(suite: str) -> str:
    """Name of the picture of a suite's tasks or categories."""
    return f"{suite}_{reporting_of(suite).parts_title.replace(' ', '_')}"


def choose_styles(charts: Sequence[Chart]) -> dict[str, int]:
    """A number for each label, the same in all charts: it chooses color, dashes and marker."""
    labels = (line.label for chart in charts for panel in chart.panels for line in panel.lines)
    return {label: number for number, label in enumerate(dict.fromkeys(labels))}


# ----------------------------------------------------------------------------------------- lines


def _over_training(
    comparison: Comparison, scores: Sequence[ReportedScore], axis: str
) -> Iterator[Panel]:
    for score in scores:
        if lines := list(lines_over_training(comparison, score, axis)):
            yield Panel(score.title, axis, lines, _dense_scores(comparison, score))


def lines_over_training(
    comparison: Comparison, score: ReportedScore, axis: str = "tokens"
) -> Iterator[Line]:
    """A line per setup. Untrained runs are left out if any run was trained."""
    known = comparison.curves_of(score)
    shown = [pair for pair in known if pair[1].is_trained] or known
    setups: dict[str, list[tuple[RunResults, Curve]]] = {}
    for run, curve in shown:
        setups.setdefault(run.setup, []).append((run, curve))
    differ = {
        (run.model, run.ratio, run.window, str(dict(run.differences).items())) for run, _ in shown
    }
    for setup, members in setups.items():
        run, curves = members[0][0], [curve for _, curve in members]
        label = run.name
        if len(curves) > 1:
            label = f"{run.method if len(differ) == 1 else setup} (mean of {len(curves)} seeds)"
        common = sorted(set.intersection(*(set(curve.tokens) for curve in curves)))
        if common and (x := _along(axis, run, common)) is not None:
            statistics = map(intervals.value_after, common)
            yield Line(label, x, [intervals.estimate_mean(curves, s) for s in statistics])


def _along(axis: str, run: RunResults, tokens: Sequence[float]) -> Numbers | None:
    """What the training had used up when it had seen so many tokens."""
    if axis == "tokens":
        return np.array(tokens)
    spent = run.spent(axis)
    known = all(int(count) in spent for count in tokens)
    return np.array([spent[int(count)] for count in tokens]) if known else None


def _lines_over_ratios(comparison: Comparison, score: ReportedScore) -> list[Line]:
    """Scores before training: a line per method."""
    one_model = len({run.model for run in comparison.runs}) == 1
    one_window = len({run.window for run in comparison.runs}) == 1
    starts: dict[str, dict[float, Estimate]] = {}
    for members in seeds_of_setups(comparison, score, at_end=False).values():
        run, curves = members[0][0], [curve for _, curve in members]
        if run.ratio:
            label = run.method if one_model else f"{run.model} {run.method}"
            label += "" if one_window else f" W{run.window}"
            label += "".join(f", {name} {value}" for name, value in run.differences.items())
            start = intervals.estimate_mean(curves, intervals.value_at(0))
            starts.setdefault(label, {})[run.ratio] = start
    lines = []
    for label, by_ratio in starts.items():
        ratios = sorted(by_ratio)
        lines.append(Line(label, np.array(ratios), [by_ratio[ratio] for ratio in ratios]))
    return lines


def _loss_lines(runs: Sequence[RunResults], name: str) -> Iterator[Line]:
    """A line per run."""
    for run in runs:
        if points := run.training_points(name):
            parts = np.array_split(np.array(points, float), min(len(points), MOST_POINTS))
            means = np.array([part.mean(0) for part in parts])
            yield Line(run.name, means[:, 0], [Estimate(float(loss)) for loss in means[:, 1]])


def _dense_scores(comparison: Comparison, score: ReportedScore) -> dict[str, float]:
    """By label, of each dense model. Runs of one model share it."""
    scores: dict[str, float] = {}
    for run in comparison.runs:
        value = comparison.dense_value(run.name, score)
        if value is not None:
            scores.setdefault(run.model, value.value)
    return _name_dense(scores)


def _dense_losses(runs: Sequence[RunResults], name: str) -> dict[str, float]:
    """The same for the validation loss. Runs with other held-out texts have one of their own."""
    first = {run.dense_validation_loss: run.name for run in reversed(runs)}
    heights = {run: loss for loss, run in first.items() if loss is not None}
    return _name_dense(heights) if name == "validation_loss" else {}


def _name_dense(heights: Mapping[str, float]) -> dict[str, float]:
    many = len(heights) > 1
    return {f"dense {name}" if many else "dense model": y for name, y in heights.items()}


# --------------------------------------------------------------------------------------- drawing


def draw_panel(axes: "Axes", panel: Panel, styles: Mapping[str, int]) -> list[Numbers]:
    """Returns where the points of each line are, in the panel's own units."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    places = []
    for number, line in enumerate(panel.lines):
        style = styles[line.label]
        color = COLORS[style % len(COLORS)]
        x, y = line.x, line.y
        if panel.axis == "ratio":  # beside each other, since all lines have the same few ratios
            x = x + 0.03 * ((number + 1) / (len(panel.lines) + 1) - 0.5)
        label, group = picture_label(line.label), f"line-{style}"
        dashes = DASHES[style // len(COLORS) % len(DASHES)]
        marker = MARKERS[style % len(MARKERS)] if len(x) < 60 else ""
        axes.plot(x, y, dashes, color=color, marker=marker, ms=4, lw=1.5, label=label, gid=group)
        places.append(np.array([x, y]).T)
        low, high = np.array([(point.low, point.high) for point in line.points], float).T
        num_known = np.count_nonzero(~np.isnan(low))
        if panel.axis == "ratio" or num_known == 1:
            axes.vlines(x, low, high, color=color, alpha=0.5, lw=1.5, gid=group)
        elif num_known and len(panel.lines) <= MOST_BANDS:
            axes.fill_between(x, low, high, color=color, alpha=0.13, lw=0, gid=group)
    for label, height in panel.dense.items():
        axes.axhline(height, color=INK, alpha=0.6, lw=1, ls=(0, (6, 2)))
        text = picture_label(f"{label} {panel.show(height)}")
        # On the side of the line that curves reach last.
        side, points = ("bottom", 3) if panel.is_loss else ("top", -3)
        place: dict[str, Any] = {
            "xycoords": axes.get_yaxis_transform(),
            "textcoords": "offset points",
        }
        axes.annotate(text, (0.01, height), (0, points), va=side, alpha=0.8, **place)
    unit = "nats per token" if panel.is_loss else "score (%)"
    axes.set(title=picture_label(panel.title), xlabel=AXES[panel.axis], ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    if panel.axis == "ratio":
        axes.set_xticks(sorted({ratio for line in panel.lines for ratio in line.x}))
    if panel.axis in ("tokens", "flops"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)
    return places


def draw_picture(chart: Chart, styles: Mapping[str, int]) -> "Figure":
    """For papers: all panels side by side, with one legend below."""
    from matplotlib.figure import Figure  # without pyplot, which keeps state and picks a display

    columns = min(COLUMNS, len(chart.panels))
    rows = -(-len(chart.panels) // columns)
    size = (PANEL[0] * columns, PANEL[1] * rows + 0.5)
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    for place, panel in enumerate(chart.panels, 1):
        draw_panel(figure.add_subplot(rows, columns, place), panel, styles)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    longest = 0.5 + 0.057 * max(map(len, handles))  # inches, with the line beside it
    columns = max(1, min(len(handles), int(size[0] / longest)))
    further_rows = max(0, -(-len(handles) // columns) - 2)  # two are part of every figure
    figure.set_figheight(size[1] + further_rows * LEGEND_ROW)
    keys, labels = list(handles.values()), list(handles)
    style: dict[str, Any] = {"ncols": columns, "frameon": False, "fontsize": 8}
    figure.legend(keys, labels, loc="outside lower center", **style)
    return figure


def draw_pictures(charts: Sequence[Chart], out: Path) -> list[Path]:
    """A picture of each chart. Those of an earlier comparison are deleted."""
    names = ["recovery", "zero_shot"]
    for suite in list_plugins(SUITES):
        with suppress(UserError):  # its file is broken
            names.append(parts_picture(suite))
    for name in names:
        (out / f"{name}.png").unlink(missing_ok=True)
    styles = choose_styles(charts)
    paths = []
    for chart in charts:
        if chart.name is not None:
            paths.append(out / f"{chart.name}.png")
            write_picture(draw_picture(chart, styles), paths[-1])
    return paths


def panel_for_page(panel: Panel, styles: Mapping[str, int]) -> dict[str, Any]:
    """The panel as SVG whose lines have the classes `line line-N`, and its points: place in the
    SVG, number of the line, what there is to say of it."""
    import matplotlib
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    svg = io.StringIO()
    # Markers are defined once in an SVG, by a name that has to be unique in the page.
    look: Any = {"svg.hashsalt": f"{panel.title} {panel.axis}", "svg.fonttype": "none"}
    with matplotlib.rc_context(look | dict.fromkeys(inked, INK)):
        figure = Figure(figsize=PANEL, dpi=72)
        axes = figure.add_axes((0.15, 0.17, 0.83, 0.73))
        places = draw_panel(axes, panel, styles)
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    drawn = NOT_IN_A_PAGE.sub("", svg.getvalue()[svg.getvalue().index("<svg") :])
    drawn = re.sub(r'id="(line-\d+)"', r'class="line \1"', drawn).replace(INK, "currentColor")
    for number, color in enumerate(COLORS):
        drawn = drawn.replace(color, f"var(--line-{number})")
    drawn = re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.1f}", drawn)
    points = []
    for line, at in zip(panel.lines, places, strict=True):
        pixels = axes.transData.transform(at)
        for (x, y), place, point in zip(pixels, line.x, line.points, strict=True):
            text = [f"{panel.title}: {show_estimate(point, panel.show)}", panel.show_place(place)]
            for label, height in panel.dense.items():
                change = (point.value or 0.0) - height
                text.append(f"{'−' if change < 0 else '+'}{panel.show(abs(change))} from {label}")
            at_pixel = [round(x, 1), round(72 * PANEL[1] - y, 1)]  # from the upper left corner
            points.append([*at_pixel, styles[line.label], *map(visible, text)])
    return {"svg": drawn, "points": points}
