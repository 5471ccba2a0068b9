"""The course of the gates during learning: one line per step in `gates.jsonl`, and a picture of it.

The picture shows every gate over the steps, orange where it is open, and below it the curves of the
constraint.
"""
# U units, which have one gate each: [layer][group] or [layer][0]

from pathlib import Path
from typing import Any

from bosch.run.errors import UserError
from bosch.run.inside import open_own_file
from bosch.run.lines import append_line, read_lines, sealed_lines
from bosch.run.manifest import write_atomically

HISTORY = "gates.jsonl"
PICTURE = "gates.png"
MOST_COLUMNS = 1_000  # most steps to draw; of more, every n-th is drawn

# Curves below the gates: (name, figures). A panel without data is left out.
PANELS = (
    ("share on the window", ("window_share",)),
    ("mean gate", ("mean_gate",)),
    ("penalty", ("penalty",)),
    ("multipliers", ("linear", "quadratic")),
)


class GateHistory:
    """Writes the lines; used by one process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / HISTORY
        self._is_cut = False

    def write(self, step: int, figures: dict[str, float], gates_U: list[list[float]]) -> None:
        if not self._is_cut:  # drop steps after the last checkpoint of a killed attempt
            lines = [line for line in read_history(self.path) if line["step"] < step]
            if [line["step"] for line in lines] != list(range(1, step)):
                raise _damaged(self.path, "it lacks steps")
            write_atomically(self.path, sealed_lines(lines))
            self._is_cut = True
        line = {"step": step} | {name: round(value, 6) for name, value in figures.items()}
        gates = [[round(value, 6) for value in row] for row in gates_U]
        with open_own_file(self.path, "ab") as file:
            append_line(file, line | {"gates": gates})


def read_history(path: Path) -> list[dict[str, Any]]:
    """The complete lines; a last one cut off by a kill is dropped."""
    lines = []
    for number, line in read_lines(path):
        if line is None or line.get("step") != number or "gates" not in line:
            raise _damaged(path, f"line {number} is not step {number}")
        lines.append(line)
    return lines


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged: {reason}; make the mask again with --fresh.")


def draw_history(path: Path, out: Path, title: str, ratio: float) -> None:
    """Write the picture. The same lines give the same bytes."""
    # Not pyplot, which would keep state and choose a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    from bosch.masks.picture import FULL_COLOR, WINDOW_COLOR, write_picture

    lines = read_history(path)
    lines = lines[:: max(1, -(-len(lines) // MOST_COLUMNS))]
    steps = [line["step"] for line in lines]
    num_layers, num_columns = len(lines[0]["gates"]), len(lines[0]["gates"][0])
    panels = [(name, [n for n in names if n in lines[0]]) for name, names in PANELS]
    panels = [(name, figures) for name, figures in panels if figures]

    heights = [min(12.0, 1.2 + 0.06 * num_layers * num_columns)] + [1.5] * len(panels)
    figure = Figure(figsize=(8, sum(heights) + 0.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]

    units = [(layer, column) for layer in range(num_layers) for column in range(num_columns)]
    rows = [[line["gates"][layer][column] for line in lines] for layer, column in units]
    colors = LinearSegmentedColormap.from_list("gates", [WINDOW_COLOR, FULL_COLOR])
    image = axes[0].pcolormesh(
        steps, range(len(rows)), rows, cmap=colors, vmin=0, vmax=1, shading="nearest"
    )
    shown = range(0, num_layers, max(1, num_layers // 16))
    centers = [layer * num_columns + (num_columns - 1) / 2 for layer in shown]
    axes[0].set_yticks(centers, [str(layer) for layer in shown])
    for layer in range(1, num_layers if num_columns > 1 else 0):
        axes[0].axhline(layer * num_columns - 0.5, color="white", linewidth=0.6)
    axes[0].set(ylabel="layer", title=title)
    figure.colorbar(image, ax=axes[0], label="gate: 1 full, 0 window", pad=0.01)

    for axis, (name, figures) in zip(axes[1:], panels, strict=True):
        for each in figures:
            axis.plot(steps, [line[each] for line in lines], label=each)
        if name == "share on the window":
            axis.axhline(ratio, color="#444444", linewidth=1, linestyle="--")
        if len(figures) > 1:
            axis.legend(frameon=False)
        axis.set_ylabel(name, fontsize=8)
    axes[-1].set_xlabel("step")
    write_picture(figure, out)
