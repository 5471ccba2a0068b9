"""The pictures of the analyses, one function each. Same numbers, same bytes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bosch.masks.depth import Block, Nesting, share_of_masks
from bosch.masks.mask import GroupMask
from bosch.masks.overlap import Turnover
from bosch.masks.performance import Comparable, Correlation
from bosch.masks.picture import FULL_COLOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 4  # panels side by side
COLORS = [f"C{number}" for number in range(10)]


@dataclass(frozen=True)
class Triangles:
    """A table of pairs; its two triangles may show different things."""

    title: str
    labels: Sequence[str]
    values: NDArray[np.float64]  # [row, column]; nan: nothing to say


def draw_distances(panels: Sequence[Triangles], note: str, path: Path) -> None:
    _draw_triangles(panels, note, path, "Jaccard distance", "viridis", (0.0, 1.0), "{:.2f}")


def draw_chances(panels: Sequence[Triangles], note: str, path: Path) -> None:
    most = max([3.0, *(float(np.nanmax(np.abs(p.values), initial=0)) for p in panels)])
    label = "deviations above random masks"
    _draw_triangles(panels, note, path, label, "RdBu_r", (-most, most), "{:+.1f}")


def _draw_triangles(
    panels: Sequence[Triangles],
    note: str,
    path: Path,
    label: str,
    colors: str,
    limits: tuple[float, float],
    number: str,
) -> None:
    size = 1.6 + 0.48 * max(len(panel.labels) for panel in panels)
    figure, axes = _grid(len(panels), size + 0.6, size)
    image: Any = None
    for axis, panel in zip(axes, panels, strict=True):
        shown = np.ma.masked_invalid(panel.values)
        image = axis.imshow(shown, cmap=colors, vmin=limits[0], vmax=limits[1])
        axis.set_title(panel.title, fontsize=9)
        places = range(len(panel.labels))
        axis.set_xticks(places, panel.labels, rotation=60, ha="right", fontsize=7)
        axis.set_yticks(places, panel.labels, fontsize=7)
        for (row, column), value in np.ndenumerate(panel.values):
            if not np.isnan(value):
                red, green, blue, _ = image.cmap(image.norm(value))
                dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
                color = "white" if dark else "black"
                text = number.format(value)
                axis.text(column, row, text, ha="center", va="center", fontsize=6, color=color)
    figure.colorbar(image, ax=list(axes), label=label, shrink=0.8)
    _finish(figure, note, path)


def draw_turnover(methods: Mapping[str, Mapping[str, Turnover]], note: str, path: Path) -> None:
    """Of each method the steps between ratios; raw turnover above, normalized below. Methods that
    give nothing up are named instead of drawn.
    """
    idle = [name for name, steps in methods.items() if all(t.raw == 0 for t in steps.values())]
    if idle:
        note += f"\nnone: {', '.join(idle)}"
    methods = {name: steps for name, steps in methods.items() if name not in idle} or methods
    names = list(dict.fromkeys(step for steps in methods.values() for step in steps))
    width = 0.8 / len(methods)
    figure, axes = _grid(2, 2.2 + 0.34 * len(names) * (len(methods) + 1), 2.8, columns=1)
    for axis, what in zip(axes, ("raw", "normalized"), strict=True):
        for number, (method, steps) in enumerate(methods.items()):
            places = [names.index(step) - 0.4 + width * (number + 0.5) for step in steps]
            values = [100 * (getattr(found, what) or 0) for found in steps.values()]
            chance = "chance" if what == "raw" else "normalized_chance"
            chances = [getattr(found, chance) for found in steps.values()]
            axis.bar(places, values, 0.9 * width, label=method, color=COLORS[number % len(COLORS)])
            for place, chance in zip(places, chances, strict=True):
                if chance is not None:
                    ends = (place - 0.45 * width, place + 0.45 * width)
                    axis.plot(ends, [100 * chance] * 2, color="black", linewidth=1.2)
        axis.set_xticks(range(len(names)), names)
        axis.set_ylabel(f"{what} turnover, %", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].plot([], [], color="black", linewidth=1.2, label="random masks")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8
    )
    _finish(figure, note, path)


def draw_depth(masks: Sequence[tuple[str, GroupMask, Block]], note: str, path: Path) -> None:
    """Each layer's share of windowed groups, a row a mask (name, mask, block to outline)."""
    from matplotlib.patches import Rectangle

    num_layers = max(mask.num_layers for _, mask, _ in masks)
    size = (2.6 + 0.26 * num_layers, 1.3 + 0.26 * len(masks))
    figure, (axis,) = _grid(1, *size)
    shares = np.full((len(masks), num_layers), np.nan)
    for row, (_, mask, _) in enumerate(masks):
        shares[row, : mask.num_layers] = mask.layer_ratios
    image = axis.imshow(np.ma.masked_invalid(shares), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, (_, _, block) in enumerate(masks):
        if block.first_layer is not None:
            corner = (block.first_layer - 0.5, row - 0.42)
            outline = Rectangle(
                corner, block.num_layers, 0.84, fill=False, edgecolor=FULL_COLOR, linewidth=1.6
            )
            axis.add_patch(outline)
    axis.set_yticks(range(len(masks)), [name for name, _, _ in masks], fontsize=7)
    axis.set_xticks(range(0, num_layers, max(1, num_layers // 16)))
    axis.set_xlabel("layer", fontsize=8)
    figure.colorbar(image, ax=axis, label="windowed", shrink=0.9)
    _finish(figure, note, path)


def draw_nesting(
    chains: Mapping[str, tuple[Sequence[GroupMask], Nesting]], note: str, path: Path
) -> None:
    """How many of a chain's masks window each group; crossed where a larger ratio gives it back."""
    sizes = [masks[0] for masks, _ in chains.values()]
    width = 1.7 + 0.2 * max(mask.num_groups for mask in sizes)
    height = 1.2 + 0.18 * max(mask.num_layers for mask in sizes)
    figure, axes = _grid(len(chains), max(2.4, width), height)
    image: Any = None
    for axis, (name, (masks, found)) in zip(axes, chains.items(), strict=True):
        image = axis.imshow(
            share_of_masks(masks), cmap="Blues", vmin=0, vmax=1, origin="lower", aspect="auto"
        )
        if found.returned:
            layers, groups = zip(*found.returned, strict=True)
            axis.scatter(groups, layers, marker="x", color=FULL_COLOR, s=14, linewidths=1.2)
        kept = ", ".join(f"{100 * share:.0f}" for share in found.kept)
        axis.set_title(f"{name}\nkept {kept} %, core {len(found.core)}", fontsize=8)
        axis.set_xlabel("group", fontsize=7)
        axis.set_ylabel("layer", fontsize=7)
        axis.tick_params(labelsize=6)
    figure.colorbar(image, ax=list(axes), label="share of the ratios that window it", shrink=0.8)
    _finish(figure, note, path)


def draw_performance(
    measures: Mapping[str, tuple[Mapping[str, Comparable], Correlation]], note: str, path: Path
) -> None:
    """A panel a measure, a point a pair of masks, a color a group of comparable masks."""
    names = list(dict.fromkeys(name for groups, _ in measures.values() for name in groups))
    figure, axes = _grid(len(measures), 4.4, 3.6)
    for axis, (measure, (groups, found)) in zip(axes, measures.items(), strict=True):
        for name, group in groups.items():
            color = COLORS[names.index(name) % len(COLORS)]
            axis.scatter(*group.pairs(), s=14, color=color, alpha=0.8)
        told = "nothing varies"
        if found.spearman is not None:
            told = f"Spearman {found.spearman:+.2f}, p {found.p_value:.2g}"
        axis.set_title(f"{measure}: {told}", fontsize=8)
        axis.set_xlabel("Jaccard distance", fontsize=8)
        axis.set_ylabel("difference in score", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for number, name in enumerate(names):
        axes[0].scatter([], [], color=COLORS[number % len(COLORS)], label=name)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    _finish(figure, note, path)


def draw_replacement(rows: Sequence[Mapping[str, Any]], note: str, path: Path) -> None:
    """A panel a step and measure: the score of each mask by origin, and a line at their mean."""
    panels: dict[str, dict[str, Sequence[float]]] = {}
    for row in rows:
        for measure, scores in row["scores"].items():
            panels.setdefault(f"{row['step']}\n{measure}", {})[row["origin"]] = scores
    figure, axes = _grid(len(panels), 2.9, 3.0)
    for axis, (title, origins) in zip(axes, panels.items(), strict=True):
        for place, scores in enumerate(origins.values()):
            axis.scatter([place] * len(scores), scores, color=f"C{place}", s=18)
            mean = sum(scores) / len(scores)
            axis.plot((place - 0.25, place + 0.25), (mean, mean), color=f"C{place}", linewidth=2)
        axis.set_xticks(range(len(origins)), list(origins), fontsize=7)
        axis.set_xlim(-0.5, len(origins) - 0.5)
        axis.set_title(title, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    _finish(figure, note, path)


def _grid(
    count: int, width: float, height: float, columns: int = COLUMNS
) -> tuple["Figure", Sequence[Any]]:
    """A figure with this many panels of this size in inches, and their axes."""
    # A Figure of its own: pyplot would keep state and pick a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(count, columns)
    down = math.ceil(count / across)
    size = (min(40.0, width * across), min(40.0, height * down + 0.4))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def _finish(figure: "Figure", note: str, path: Path) -> None:
    figure.suptitle(note, fontsize=9)
    figure.savefig(path, format="png", metadata={"Software": None})
