"""The curves of a comparison as pictures, for its page and for papers: scores and the loss over
training, scores over ratios before it. Bands and bars are 95% intervals. The same numbers give the
same bytes.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bosch.eval.report.compare import LOSS, Comparison, by_setup, seeds_of_setups
from bosch.eval.report.intervals import Estimate, estimate, value_after, value_at
from bosch.eval.report.tables import show_points
from bosch.eval.settings import SUITES
from bosch.eval.suites._reporting import ReportedScore, reporting_of
from bosch.masks.picture import write_picture
from bosch.plugins import list_plugins
from bosch.run.errors import UserError
from bosch.run.plain_text import picture_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOKENS, RATIO = "training tokens", "share of groups on the window"
MOST_BANDS = 6  # lines with bands in a panel; more of them would cover each other
COLUMNS = 3  # panels side by side
PANEL = (4.2, 2.9)  # inches
LEGEND_ROW = 0.19  # inches
NAME_SHARE = 0.13  # of a panel's height, for the name of a dense model
COLORS = "#d95f02 #1f6fb2 #1b9e77 #c2187a #7a5cc9 #8a6d00 #0aa3b5 #a3231f #4d7d16 #5b6470".split()
DASHES = ("-", "--", ":", "-.")
INK = "#1d2126"


@dataclass(frozen=True)
class Panel:
    score: ReportedScore
    axis: str  # TOKENS or RATIO
    # A line is a run, or the mean over the seeds of a setup: label -> scores at their places.
    lines: Mapping[str, Sequence[tuple[float, Estimate]]]
    dense: Sequence[tuple[str, float]]  # label and score of each dense model

    @property
    def has_something(self) -> bool:
        """A line, or two dots that can be compared."""
        counts = [len(points) for points in self.lines.values()]
        return (sum(counts) if self.axis == RATIO else max(counts, default=0)) > 1


@dataclass(frozen=True)
class Chart:
    """Panels in one picture."""

    name: str
    title: str
    panels: Sequence[Panel]

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for panel in self.panels for label in panel.lines))


def draw_pictures(comparison: Comparison, out: Path) -> dict[str, Path]:
    """All pictures that have something to show, by title. Those of an earlier comparison are
    deleted."""
    names = ["recovery", "zero_shot", "losses"]
    # Of all suites, not of this comparison's: an earlier one may have had others, and its pictures
    # would be taken for this one's.
    for suite in list_plugins(SUITES):
        with suppress(UserError):  # its file is broken
            names.append(parts_picture(suite)[0])
    for name in names:
        (out / f"{name}.png").unlink(missing_ok=True)
    charts, pictures = make_charts(comparison), {}
    labels = list(dict.fromkeys(label for chart in charts for label in chart.labels))
    for chart in charts:
        pictures[chart.title] = out / f"{chart.name}.png"
        write_picture(draw_chart(chart, labels), pictures[chart.title])
    return pictures


def make_charts(comparison: Comparison) -> list[Chart]:
    """The most important first. Figure 3 of the paper is the recovery over tokens; its tables 1 and
    2 are the scores before training."""
    averages = comparison.scores_of("average")
    after = [_over_training(comparison, score) for score in averages]
    before = [_over_ratios(comparison, score) for score in averages]
    charts = [
        Chart("recovery", "averages over training", after),
        Chart("zero_shot", "averages before training", before),
    ]
    for suite in comparison.suites:
        parts = [_over_training(comparison, s) for s in comparison.scores_of("part", suite)]
        charts.append(Chart(*parts_picture(suite), parts))
    charts.append(Chart("losses", "loss on held-out texts", [_over_training(comparison, LOSS)]))
    charts = [replace(chart, panels=[p for p in chart.panels if p.lines]) for chart in charts]
    return [chart for chart in charts if any(panel.has_something for panel in chart.panels)]


def parts_picture(suite: str) -> tuple[str, str]:
    """Name and title of the picture of a suite's tasks or categories."""
    reporting = reporting_of(suite)
    name = f"{suite}_{reporting.parts_title.replace(' ', '_')}"
    return name, f"{reporting.title} {reporting.parts_title}"


def _over_training(comparison: Comparison, score: ReportedScore) -> Panel:
    """A line per setup. Untrained runs are left out if any run was trained."""
    known = comparison.curves_of(score)
    shown = [curve for curve in known if curve.is_trained] or known
    setups = by_setup(shown)
    if score is LOSS:  # each seed has other texts, and these differ by more than a training changes
        setups = {curve.run.name: [replace(curve, replicates=None)] for curve in shown}
    lines = {}
    for setup, curves in setups.items():
        # Only where all seeds were evaluated is a mean drawn; else a line would jump where one
        # drops out.
        label = f"{setup} (mean of {len(curves)} seeds)" if curves[1:] else curves[0].run.name
        if tokens := sorted(set.intersection(*(set(curve.tokens) for curve in curves))):
            lines[label] = [(count, estimate(curves, value_after(count))) for count in tokens]
    return Panel(score, TOKENS, lines, _dense(comparison, score))


def _over_ratios(comparison: Comparison, score: ReportedScore) -> Panel:
    """Scores before training: a line per method."""
    starts: dict[str, dict[float, Estimate]] = {}
    for curves in seeds_of_setups(comparison, score, at_end=False).values():
        run, settings = curves[0].run, curves[0].run.settings
        if settings["ratio"]:
            label = f"{settings['model']} {run.method} W{settings['window']}"
            label += run.described_differences
            starts.setdefault(label, {})[settings["ratio"]] = estimate(curves, value_at(0))
    lines = {label: sorted(by_ratio.items()) for label, by_ratio in starts.items()}
    return Panel(score, RATIO, lines, _dense(comparison, score))


def _dense(comparison: Comparison, score: ReportedScore) -> list[tuple[str, float]]:
    """Runs of one model share its score on the same examples, but for bf16's rounding."""
    found: dict[float, str] = {}
    for run in comparison.runs:
        dense = comparison.curves[run.name, score].dense
        if not math.isnan(dense) and all(abs(dense - known) > 1e-3 for known in found):
            found[dense] = run.settings["model"]
    many = len({*found.values()}) > 1
    return [(f"dense {name}" if many else "dense model", y) for y, name in found.items()]


def draw_chart(chart: Chart, labels: Sequence[str]) -> "Figure":
    """All panels side by side, with one legend below. `labels`: of all charts, so that a run has
    the same color in each."""
    from matplotlib.figure import Figure  # without pyplot, which keeps state and picks a display

    columns = min(COLUMNS, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    longest = 0.5 + 0.057 * max(map(len, chart.labels))  # inches, with the line beside it
    width = max(PANEL[0] * columns, longest)
    across = max(1, int(width / longest))  # names in a row of the legend
    height = PANEL[1] * rows + 0.2 + LEGEND_ROW * math.ceil(len(chart.labels) / across)
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    handles: dict[str, Any] = {}
    for place, panel in enumerate(chart.panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        _draw_panel(axes, panel, labels)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        [*handles.values()],
        [*handles],
        loc="outside lower center",
        ncols=across,
        frameon=False,
        fontsize=8,
    )
    return figure


def _draw_panel(axes: "Axes", panel: Panel, labels: Sequence[str]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    is_loss, over_ratios = panel.score is LOSS, panel.axis == RATIO
    sign = -1 if is_loss else 1  # curves hold losses as their negatives
    for number, (label, points) in enumerate(panel.lines.items(), 1):
        # By its place among all labels, so that a run has one color in every picture of a page.
        style = labels.index(label)
        color, dashes = COLORS[style % len(COLORS)], DASHES[style // len(COLORS) % len(DASHES)]
        # Bars at one ratio stand side by side.
        shift = 0.03 * (number / (len(panel.lines) + 1) - 0.5) if over_ratios else 0.0
        x = np.array([place for place, _ in points]) + shift
        y = sign * np.array([point.value for _, point in points], float)
        axes.plot(x, y, dashes, label=picture_label(label), color=color, marker="o", ms=4, lw=1.5)
        pairs = zip(x, points, strict=True)
        known = [(place, p.low, p.high) for place, (_, p) in pairs if p.low is not None]
        place, low, high = np.array(known, float).reshape(-1, 3).T
        # Bars where points stand alone; a band needs two points.
        if over_ratios or len(points) == 1:
            axes.vlines(place, low, high, color=color, alpha=0.5, lw=1.5)
        elif known and len(panel.lines) <= MOST_BANDS:
            axes.fill_between(place, low, high, color=color, alpha=0.13, lw=0)
    for _, score in panel.dense:
        axes.axhline(sign * score, color=INK, alpha=0.6, lw=1, ls=(0, (6, 2)))
    title = f"{panel.score.title}, before training" if over_ratios else panel.score.title
    unit = "nats per token" if is_loss else "score (%)"
    axes.set(title=picture_label(title), xlabel=panel.axis, ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    if over_ratios:
        ratios = sorted({ratio for points in panel.lines.values() for ratio, _ in points})
        ticks = ratios[:1]  # those that are so close that their labels would overlap are left out
        for ratio in ratios[1:]:
            if ratio - ticks[-1] > (ratios[-1] - ratios[0]) / 12:
                ticks.append(ratio)
        axes.set_xticks(ticks)
    else:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)
    if not is_loss:  # no room for scores that cannot be
        bottom, top = axes.get_ylim()
        margin = min(2.0, 0.04 * (top - bottom))  # so that dots at 0 and 100 are whole
        axes.set_ylim(max(bottom, -margin), min(top, 100 + margin))
    _name_dense(axes, panel, sign)


def _name_dense(axes: "Axes", panel: Panel, sign: int) -> None:
    """Each dense model's name and score, beside the panel: inside they would lie on curves."""
    bottom, top = axes.get_ylim()  # of all that is drawn, so this comes last
    places, lowest = [], -math.inf
    for label, score in sorted(panel.dense, key=lambda one: sign * one[1]):
        number = f"{-score:.3f}" if panel.score is LOSS else show_points(score)
        # Names of lines that are close stand above each other: two lines of text take NAME_SHARE.
        lowest = max((sign * score - bottom) / (top - bottom), lowest + NAME_SHARE)
        places.append((f"{picture_label(label)}\n{number}", lowest))
    axes.set_ylim(bottom, top)
    for text, place in places:
        axes.text(
            1.02,
            place,
            text,
            transform=axes.transAxes,
            va="center",
            fontsize=8,
            alpha=0.8,
        )
