"""Draws `search.png`: the scores of stage 1 by layer, the ratios of stage 2 over depth, and the
best mask against evaluations. Panels without data are left out."""

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bosch.masks.picture import write_picture
from bosch.search.search import Search

LINE, DOTS, MARK = "#d95f02", "#9ecae1", "#444444"
START = "start "  # begins the names of the parts that score one
DASHED: dict[str, Any] = {"color": MARK, "linewidth": 1, "linestyle": "--"}


def draw_search(search: Search, path: Path) -> None:
    """The same search gives the same bytes."""
    stages = {"group_worth": draw_worth, "stage1_scores": draw_layers, "ratios": draw_ratios}
    panels = [draw for name, draw in stages.items() if name in search.details]
    widths = [4.0] * len(panels) + [7.0]
    figure = Figure(figsize=(sum(widths), 4.2), dpi=130, layout="constrained")
    axes = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    for draw, axis in zip([*panels, draw_evaluations], axes, strict=True):
        axis.set(xlabel="layer")
        axis.xaxis.get_major_locator().set_params(integer=True)
        draw(axis, search)
        axis.spines[["top", "right"]].set_visible(False)
    write_picture(figure, path)


def draw_layers(axis: Axes, search: Search) -> None:
    """The score after each layer of the paper's stage 1."""
    scores = search.details["stage1_scores"]
    axis.plot(range(search.num_layers), scores, color=LINE, marker="o", markersize=4)
    axis.axhline(search.score_of(search.anchors.dense), label="dense model", **DASHED)
    axis.set(ylabel=f"{search.settings.objective}, this layer and those above localized")
    axis.set(title="stage 1, from the top layer down")
    axis.legend(frameon=False)


def draw_worth(axis: Axes, search: Search) -> None:
    """What each group is worth by its probe, and whether the mask keeps it full."""
    worth_LG, z_LG = np.array(search.details["group_worth"]), np.array(search.z)
    for bit, color, label in ((1, LINE, "stays full"), (0, DOTS, "on the window")):
        layers, groups = np.nonzero(z_LG == bit)
        axis.plot(layers, worth_LG[layers, groups], "o", color=color, label=label)
    axis.set(ylabel="log-probability that the group keeps", title="stage 1, each group alone")
    axis.legend(frameon=False)


def draw_ratios(axis: Axes, search: Search) -> None:
    """The ratio that stage 2 gave each layer, and its ratio in the final mask."""
    layers = range(search.num_layers)
    axis.bar(layers, search.details["ratios"], color=DOTS, label="stage 2")
    final = [row.count(0) / search.num_groups for row in search.z]
    axis.plot(layers, final, color=LINE, marker="_", markersize=9, linestyle="", label="mask")
    axis.axhline(search.inputs.ratio, label="asked", **DASHED)
    axis.set(ylabel="share of groups on the window", title="ratios over depth")
    # Room for the legend above the bars, which may reach 1.
    axis.set(ylim=(0, 1.15), yticks=np.linspace(0, 1, 6))
    axis.legend(frameon=False, loc="upper center", ncols=3, fontsize=8)


def draw_evaluations(axis: Axes, search: Search) -> None:
    """Every evaluation, and the best of its subproblem so far. Those stopped early have no dot.
    The starts have marks of their own, and are a subproblem together."""
    for place, (part, value, _) in enumerate(search.course.values(), 1):
        if part.startswith(START) and value is not None:
            label = f"{part.removeprefix(START)} {value:.3f}"
            axis.plot(place, value, marker="D", markersize=5, linestyle="", label=label, zorder=3)
            axis.legend(frameon=False, fontsize=8, title="starts", title_fontsize=8)
    begin = 1
    parts = groupby(
        search.course.values(), key=lambda row: START if row[0].startswith(START) else row[0]
    )
    for number, (_, rows) in enumerate(parts):
        table = list(rows)
        values = np.array([value for _, value, _ in table], float)  # None becomes nan
        counted = np.where([counts for _, _, counts in table], values, np.nan)
        best = np.fmax.accumulate(counted)
        places = range(begin, begin := begin + len(values))
        if number % 2:
            axis.axvspan(places[0] - 0.5, begin - 0.5, color="#f0f0f0", linewidth=0)
        axis.plot(places, values, color=DOTS, marker=".", markersize=3, linestyle="")
        axis.plot(places, best, color=LINE, linewidth=1.5, drawstyle="steps-post")
    axis.axhline(search.score_of(search.anchors.dense), **DASHED)
    axis.set(xlabel="evaluations", ylabel=search.settings.objective)
    axis.set(title="best mask of each subproblem")
