"""What the groups of a model are worth, from the probes of `single_group`: a picture, how sure it
is, how stable over calibration sets, and which cheaper scores agree with it.

    python -m benchmarks head_map --sets masks/single_group-s0 masks/single_group-s1 \\
        --scores masks/razor-s0 masks/fisher-s0 --picture head_map.png

`--sets`: folders that `single_group` measured into, each with another calibration set. `--scores`:
those of other methods.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks._measure import BenchmarkOptions, Row
from bosch.masks.mask import num_windowed
from bosch.masks.picture import write_picture
from bosch.run.errors import MissingFileError

RATIOS = (0.75, 0.875, 0.95)
COLUMNS = {"compared": "name", "rank correlation": "value:.2f"}
COLUMNS |= {f"both, {ratio}": f"{ratio}" for ratio in RATIOS} | {"sure": "sure"}
SURE = 2.0  # standard errors


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    sets: tuple[Path, ...]  # folders of single_group's measurements
    scores: tuple[Path, ...] = ()  # folders of other methods' scores
    picture: Path = Path("head_map.png")  # to draw

    @property
    def title(self) -> str:
        return "against the probes of the first set: ranks, and groups that both keep full"


def measure(options: Options) -> Iterator[Row]:
    first_ELG, *others = [read_drops(folder) for folder in options.sets]
    mean_LG, error_LG = first_ELG.mean(0), first_ELG.std(0, ddof=1) / np.sqrt(len(first_ELG))
    draw(mean_LG, error_LG, options.picture)
    sure = int((mean_LG > SURE * error_LG).sum())
    # Half of the texts against the other half says how much of a difference is noise.
    halves = [first_ELG[half::2].mean(0) for half in (0, 1)]
    yield compare("its own halves", *halves) | {"sure": f"{sure} groups above 0"}
    for folder, drops_ELG in zip(options.sets[1:], others, strict=True):
        yield compare(folder.name, mean_LG, drops_ELG.mean(0))
    for folder in options.scores:
        found = json.loads((folder / "scores.json").read_text())
        sign = -1 if found["larger_is"] == "local" else 1
        yield compare(found["method"], mean_LG, sign * np.array(found["groups"]))


def read_drops(folder: Path) -> NDArray[np.float64]:
    """[text, layer, group]: how much log-probability the answers of a text lose."""
    file = folder / "examples.jsonl"
    if not file.is_file():
        raise MissingFileError(f"{file} does not exist; name a folder of single_group.")
    lines = sorted(map(json.loads, file.read_text().splitlines()), key=lambda line: line["index"])
    return np.array([line["result"]["drops"] for line in lines])


def compare(name: str, one_LG: NDArray[np.float64], other_LG: NDArray[np.float64]) -> Row:
    """Spearman's rank correlation, and the share of full groups that both would choose."""
    ranks = [np.argsort(np.argsort(each.ravel())) for each in (one_LG, other_LG)]
    table: NDArray[np.float64] = np.corrcoef(np.stack(ranks))
    row: Row = {"name": name, "value": float(table[0, 1]), "unit": "correlation", "sure": ""}
    for ratio in RATIOS:
        count = one_LG.size - num_windowed(ratio, one_LG.size, 1)
        both = set(np.argsort(-one_LG.ravel())[:count]) & set(np.argsort(-other_LG.ravel())[:count])
        row[f"{ratio}"] = f"{len(both)} of {count}"
    return row


def draw(mean_LG: NDArray[np.float64], error_LG: NDArray[np.float64], path: Path) -> None:
    """Layers from left to right: the map, and the groups that matter with their errors."""
    figure = Figure(figsize=(9, 4.6), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2.4])
    shown = np.log10(np.clip(mean_LG, 1e-3, None)).T
    image = above.pcolormesh(shown, cmap="YlOrRd", edgecolors="white", linewidth=0.5)
    bar = figure.colorbar(image, ax=above, ticks=[-3, -2, -1, 0])
    bar.ax.set_yticklabels(["≤ .001", ".01", ".1", "1"])
    above.set(ylabel="group", yticks=[])
    for group, (means, errors) in enumerate(zip(mean_LG.T, error_LG.T, strict=True)):
        places = np.arange(len(means)) + 0.5 + 0.22 * (group - (mean_LG.shape[1] - 1) / 2)
        below.errorbar(places, means, errors, marker="o", markersize=3, linestyle="", linewidth=1)
    below.axhline(0, color="#444444", linewidth=0.6)
    below.set_yscale("symlog", linthresh=0.05)
    below.set(xlabel="layer", ylabel="lost log-probability of an answer")
    numbers = np.arange(0, len(mean_LG), 5)
    below.set_xticks(numbers + 0.5, [str(number) for number in numbers])
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    write_picture(figure, path)
