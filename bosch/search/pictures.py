"""`search.png`: what a search did. As many panels as it has something to show: the score as stage 1
goes down the layers, the ratios of stage 2 over depth, and the best mask against evaluations.
"""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from bosch.search.search import Search

LINE, DOTS, BAR, MARK = "#d95f02", "#9ecae1", "#6baed6", "#444444"


def draw_search(search: "Search", path: Path) -> None:
    """Same search, same bytes."""
    panels: list[Callable[[Any, Search], None]] = []
    if "stage1_scores" in search.details or "whole_layer_log_probabilities" in search.details:
        panels.append(draw_layers)
    if "ratios" in search.details:
        panels.append(draw_ratios)
    panels.append(draw_evaluations)
    widths = [4.0] * (len(panels) - 1) + [7.0]
    figure = Figure(figsize=(sum(widths), 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
    for draw, axis in zip(panels, axes, strict=True):
        draw(axis, search)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.savefig(path, format="png", metadata={"Software": None})


def draw_layers(axis: Any, search: "Search") -> None:
    """The score after each layer of stage 1, or of each whole-layer probe."""
    layers = range(search.num_layers)
    if "stage1_scores" in search.details:
        axis.plot(layers, search.details["stage1_scores"], color=LINE, marker="o", markersize=4)
        dense: float | None = search.score_of(search.anchors.dense)
        title = "stage 1, from the top layer down"
        axis.set(ylabel=f"{search.settings.objective}, this layer and those above localized")
    else:
        values = search.details["whole_layer_log_probabilities"]
        axis.bar(layers, values, color=BAR)
        dense = search.anchors.dense.log_probability
        title = "stage 1, each layer on the window"
        axis.set(ylabel="mean log-probability of the answers")
    axis.axhline(dense, color=MARK, linewidth=1, linestyle="--", label="dense model")
    axis.set(xlabel="layer", title=title)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)


def draw_ratios(axis: Any, search: "Search") -> None:
    """What stage 2 gave each layer, and what the mask has in the end."""
    layers = range(search.num_layers)
    axis.bar(layers, search.details["ratios"], color=DOTS, label="stage 2")
    found = [row.count(0) / search.num_groups for row in search.z]
    axis.plot(layers, found, color=LINE, marker="_", markersize=9, linestyle="", label="mask")
    axis.axhline(search.context.ratio, color=MARK, linewidth=1, linestyle="--", label="asked")
    axis.set(xlabel="layer", ylabel="share of groups on the window", ylim=(0, 1.02))
    axis.set(title="ratios over depth")
    axis.xaxis.get_major_locator().set_params(integer=True)
    figure_legend = axis.legend(frameon=False, loc="upper center", ncols=3, fontsize=8)
    figure_legend.set_zorder(5)


def draw_evaluations(axis: Any, search: "Search") -> None:
    """Every evaluation, and the best of its subproblem so far. Those ended early have no dot."""
    begin = 0
    for number, (_, rows) in enumerate(groupby(search.values, key=lambda row: row[0])):
        values = [(value, counts) for _, value, counts in rows]
        places = range(begin + 1, begin + len(values) + 1)
        if number % 2:
            axis.axvspan(begin + 0.5, places[-1] + 0.5, color="#f0f0f0", linewidth=0)
        shown = [
            (x, value) for x, (value, _) in zip(places, values, strict=True) if value is not None
        ]
        axis.plot(
            *zip(*shown, strict=True), color=DOTS, marker=".", markersize=3, linestyle=""
        ) if shown else None
        best: list[float] = []
        for value, counts in values:
            before = best[-1] if best else float("nan")
            better = counts and value is not None and not value <= before
            best.append(value if better and value is not None else before)
        axis.plot(places, best, color=LINE, linewidth=1.5, drawstyle="steps-post")
        begin = places[-1]
    axis.axhline(search.score_of(search.anchors.dense), color=MARK, linewidth=1, linestyle="--")
    axis.set(xlabel="evaluations", ylabel=search.settings.objective)
    axis.set(title="best mask of each subproblem")
