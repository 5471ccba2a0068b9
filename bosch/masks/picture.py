"""Pictures of a mask: `draw_mask` writes mask.png, `mask_lines` draws the same for a terminal.

The first layer is at the bottom; groups go from left to right.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from bosch.masks.mask import MaskFile
from bosch.run.files import write_atomically
from bosch.run.plain_text import picture_label, visible

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FULL_COLOR = "#d95f02"  # orange: full attention
WINDOW_COLOR = "#c6dbef"  # pale blue: sliding window


def draw_mask(record: MaskFile, path: Path) -> None:
    """Same mask, same bytes."""
    write_picture(mask_figure(record), path)


def mask_figure(record: MaskFile) -> "Figure":
    """The heat map and each layer's share of windowed groups."""
    # Without pyplot, which would keep state and choose a display.
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    mask = record.mask
    layers = range(mask.num_layers)
    height = min(16.0, 2.2 + 0.22 * mask.num_layers)
    width = min(16.0, 4.4 + 0.26 * mask.num_groups)
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    groups_axis, ratio_axis = figure.subplots(1, 2, sharey=True, width_ratios=[width - 2.4, 1.4])

    colors = ListedColormap([WINDOW_COLOR, FULL_COLOR])
    groups_axis.pcolormesh(mask.z, cmap=colors, vmin=0, vmax=1, edgecolors="white", linewidth=0.8)
    groups_axis.set(xlabel="group (KV head)", ylabel="layer")
    _number(groups_axis.xaxis, mask.num_groups)
    _number(groups_axis.yaxis, mask.num_layers)

    ratio_axis.barh(
        [layer + 0.5 for layer in layers], mask.layer_ratios, height=0.8, color="#6baed6"
    )
    mean = ratio_axis.axvline(mask.ratio, color="#444444", linewidth=1, linestyle="--")
    ratio_axis.set(xlim=(0, 1), xticks=[0, 1], xlabel="share windowed")
    ratio_axis.tick_params(left=False, labelleft=False)
    for axis in (groups_axis, ratio_axis):
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)

    title = f"{picture_label(record.model.id)}\n{picture_label(mask_title(record))}"
    figure.suptitle(title, fontsize=10)
    mean.set_label("share of all groups")
    keys = [
        Patch(color=FULL_COLOR, label="full"),
        Patch(color=WINDOW_COLOR, label=f"window {mask.window_tokens}"),
        mean,
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
    return figure


def write_picture(figure: "Figure", path: Path) -> None:
    """The same figure gives the same bytes."""
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    write_atomically(path, content.getvalue())


def mask_title(record: MaskFile) -> str:
    mask = record.mask
    share = f"ratio {mask.ratio:.4g} ({mask.num_windowed}/{mask.num_total})"
    return f"{visible(record.method)}, {share}, window {mask.window_tokens}"


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
    step = max(1, -(-count // 16))
    places = range(0, count, step)
    axis.set_ticks([place + 0.5 for place in places], [str(place) for place in places])
