"""Pictures of a mask, with the first layer at the bottom, and of several. The same masks give the
same bytes. All is drawn without pyplot, which would keep state and choose a display."""

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from bosch.masks.analysis import NamedMask, compare
from bosch.masks.mask import MaskFile
from bosch.run.files import write_atomically
from bosch.run.plain_text import picture_label, visible

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FULL_COLOR = "#d95f02"  # orange: full attention
WINDOW_COLOR = "#c6dbef"  # pale blue: sliding window
COLUMNS = 4  # panels side by side


def draw_mask(record: MaskFile, path: Path) -> None:
    write_picture(mask_figure(record), path)


def mask_figure(record: MaskFile) -> "Figure":
    """The heat map and each layer's share of windowed groups."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    mask = record.mask
    # At most 16 inches: pictures of a model with 100 layers are still for a page.
    height = min(16.0, 2.2 + 0.22 * mask.num_layers)
    width = min(16.0, 4.4 + 0.26 * mask.num_groups)
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    groups_axis, ratio_axis = figure.subplots(1, 2, sharey=True, width_ratios=[width - 2.4, 1.4])

    colors = ListedColormap([WINDOW_COLOR, FULL_COLOR])
    groups_axis.pcolormesh(mask.z, cmap=colors, vmin=0, vmax=1, edgecolors="white", linewidth=0.8)
    groups_axis.set(xlabel="group (KV head)", ylabel="layer")
    _number(groups_axis.xaxis, mask.num_groups)
    _number(groups_axis.yaxis, mask.num_layers)

    centers = [layer + 0.5 for layer in range(mask.num_layers)]
    ratio_axis.barh(centers, mask.layer_ratios, height=0.8, color="#6baed6")
    mean = ratio_axis.axvline(mask.ratio, color="#444444", linewidth=1, linestyle="--")
    ratio_axis.set(xlim=(0, 1), xticks=[0, 1], xlabel="share windowed")
    ratio_axis.tick_params(left=False, labelleft=False)
    for axis in (groups_axis, ratio_axis):
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)

    title = f"{picture_label(record.model.id)}\n{picture_label(mask_title(record))}"
    figure.suptitle(title, fontsize=10)
    mean.set_label("share of all groups")
    kinds = {"full": FULL_COLOR, f"window {mask.window_tokens}": WINDOW_COLOR}
    keys = [*(Patch(color=color, label=label) for label, color in kinds.items()), mean]
    figure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_memory(record: MaskFile, path: Path) -> None:
    """The KV cache of one text in bfloat16 over the text's length: of the dense model, of the
    hybrid's entries in use, and as our dynamic cache allocates it."""
    from matplotlib.figure import Figure

    mask, size = record.mask, record.model.head_dim
    lengths = [1024 * 2**power for power in range(8)]  # to 131,072 tokens
    curves = {
        "dense model": (mask.dense_kv_bytes, "#444444", "-"),
        "hybrid, as allocated": (mask.allocated_bytes, FULL_COLOR, "--"),
        "hybrid, in use": (mask.kv_bytes, FULL_COLOR, "-"),
    }
    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    axis = figure.subplots()
    for label, (count, color, style) in curves.items():
        sizes = [count(length, size) / 2**20 for length in lengths]
        axis.plot(
            lengths, sizes, color=color, linestyle=style, marker="o", markersize=3, label=label
        )
    axis.set(xlabel="tokens of the text", ylabel="KV cache in MiB", ylim=(0, None))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.legend(frameon=False)
    title = f"{picture_label(record.model.id)}\n{picture_label(mask_title(record))}"
    figure.suptitle(title, fontsize=10)
    write_picture(figure, path)


def write_picture(figure: "Figure", path: Path) -> None:
    # Without the name of the software, which has its version: the same mask gives the same bytes.
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    write_atomically(path, content.getvalue())


def mask_title(record: MaskFile) -> str:
    mask = record.mask
    share = f"ratio {mask.ratio:.4g} ({mask.num_windowed}/{mask.num_total})"
    sink = "" if mask.sink.kind == "none" else f", sink {mask.sink}"
    return f"{visible(record.method)}, {share}, window {mask.window_tokens}{sink}"


def mask_lines(record: MaskFile) -> list[Text]:
    """The heat map for a terminal, with the last layer on top. ## is full, :: is window."""
    mask = record.mask
    label = len(str(mask.num_layers - 1))
    lines = []
    for layer in reversed(range(mask.num_layers)):
        line = Text(f"layer {layer:>{label}}  ")
        for bit in mask.z[layer]:
            line.append("## " if bit else ":: ", style=f"bold {FULL_COLOR}" if bit else "#6baed6")
        lines.append(line.append(f" {mask.layer_ratios[layer]:.3f}"))
    return lines


def _number(axis: "Axis", count: int) -> None:
    """Label at most about sixteen cells, with integers at their centers."""
    step = max(1, -(-count // 16))  # rounded up
    places = range(0, count, step)
    axis.set_ticks([place + 0.5 for place in places], [str(place) for place in places])


def draw_distances(panels: Mapping[str, Sequence[NamedMask]], path: Path) -> None:
    """One heat map per panel: the Jaccard distances between masks of one model and ratio."""
    size = 1.6 + 0.48 * max(map(len, panels.values()))
    figure, axes = _grid(len(panels), size + 0.6, size)
    image: Any = None
    for axis, (title, masks) in zip(axes, panels.items(), strict=True):
        values = np.full((len(masks), len(masks)), np.nan)
        for row, column in itertools.permutations(range(len(masks)), 2):
            # Both halves would be the same: the upper one shows what to expect by chance.
            kind = "distance" if row > column else "expected_distance"
            value = values[row, column] = compare(masks[row].mask, masks[column].mask)[kind]
            ink = "white" if value < 0.6 else "black"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=ink)
        image = axis.imshow(np.ma.masked_invalid(values), cmap="viridis", vmin=0, vmax=1)
        labels = [picture_label(mask.name) for mask in masks]
        axis.set_xticks(range(len(masks)), labels, rotation=60, ha="right", fontsize=7)
        axis.set_yticks(range(len(masks)), labels, fontsize=7)
        axis.set_title(picture_label(title), fontsize=9)
    figure.colorbar(image, ax=list(axes), label="Jaccard distance", shrink=0.8)
    note = "Below the diagonal: distance of windowed groups. Above: the same for random masks\n"
    figure.suptitle(note, fontsize=9)
    write_picture(figure, path)


def _grid(count: int, width: float, height: float) -> tuple["Figure", Sequence[Any]]:
    """A figure with this many panels of this size in inches, and their axes."""
    from matplotlib.figure import Figure

    across = min(count, COLUMNS)
    down = math.ceil(count / across)
    size = (min(40.0, width * across), min(40.0, height * down + 0.4))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]
