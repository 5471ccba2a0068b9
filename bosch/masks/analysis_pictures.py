"""The pictures of the mask analyses, one function each. Same numbers, same bytes."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bosch.masks.named_masks import NamedMask
from bosch.masks.overlap import compare
from bosch.masks.picture import write_picture
from bosch.run.plain_text import picture_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 4  # panels side by side


def draw_distances(panels: Mapping[str, Sequence[NamedMask]], path: Path) -> None:
    """One heat map per panel: the Jaccard distances between masks of one model and ratio."""
    size = 1.6 + 0.48 * max(map(len, panels.values()))
    figure, axes = _grid(len(panels), size + 0.6, size)
    image: Any = None
    for axis, (title, masks) in zip(axes, panels.items(), strict=True):
        values = np.full((len(masks), len(masks)), np.nan)
        for row, column in itertools.permutations(range(len(masks)), 2):
            agreement = compare(masks[row].mask, masks[column].mask)
            below = row > column
            values[row, column] = agreement.distance if below else agreement.expected_distance
        image = axis.imshow(np.ma.masked_invalid(values), cmap="viridis", vmin=0, vmax=1)
        for row, column in itertools.permutations(range(len(masks)), 2):
            color = "white" if values[row, column] < 0.6 else "black"
            text = f"{values[row, column]:.2f}"
            axis.text(column, row, text, ha="center", va="center", fontsize=6, color=color)
        labels = [picture_label(mask.name) for mask in masks]
        axis.set_xticks(range(len(masks)), labels, rotation=60, ha="right", fontsize=7)
        axis.set_yticks(range(len(masks)), labels, fontsize=7)
        axis.set_title(picture_label(title), fontsize=9)
    figure.colorbar(image, ax=list(axes), label="Jaccard distance", shrink=0.8)
    note = "Below the diagonal: distance of windowed groups. Above: the same for random masks\n"
    figure.suptitle(note, fontsize=9)
    write_picture(figure, path)


def draw_depth(masks: Sequence[tuple[str, NamedMask]], path: Path) -> None:
    """Each layer's share of windowed groups, one row per mask."""
    num_layers = max(mask.mask.num_layers for _, mask in masks)
    figure, (axis,) = _grid(1, 2.6 + 0.26 * num_layers, 1.3 + 0.26 * len(masks))
    shares = np.full((len(masks), num_layers), np.nan)
    for row, (_, mask) in enumerate(masks):
        shares[row, : mask.mask.num_layers] = mask.mask.layer_ratios
    image = axis.imshow(np.ma.masked_invalid(shares), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axis.set_yticks(range(len(masks)), [picture_label(name) for name, _ in masks], fontsize=7)
    axis.set_xticks(range(0, num_layers, max(1, num_layers // 16)))
    axis.set_xlabel("layer", fontsize=8)
    figure.colorbar(image, ax=axis, label="windowed", shrink=0.9)
    figure.suptitle("Share of windowed groups in each layer", fontsize=9)
    write_picture(figure, path)


def _grid(count: int, width: float, height: float) -> tuple["Figure", Sequence[Any]]:
    """A figure with this many panels of this size in inches, and their axes."""
    # Without pyplot, which would keep state and choose a display.
    from matplotlib.figure import Figure

    across = min(count, COLUMNS)
    down = math.ceil(count / across)
    size = (min(40.0, width * across), min(40.0, height * down + 0.4))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]
