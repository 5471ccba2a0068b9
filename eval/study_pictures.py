"""The pictures of docs/study.md."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from bosch.analysis.pictures import Triangles, draw_distances
from eval.pictures import COLORS, draw_recovery, draw_zero_shot, finish, grid
from eval.study import OURS, Study
from eval.study_tables import STATIC, agreements

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_study(study: Study, folder: Path) -> dict[str, str]:
    """Every picture for which there is something to show: its title by its file's name."""
    folder.mkdir(parents=True, exist_ok=True)
    hybrids = [run for run in study.comparison.runs if run.ratio]
    trained = [
        run
        for run in hybrids
        if run.method in study.trained and run.ratio == study.trained_ratio and run.training
    ]
    trained.sort(key=lambda run: run.method == OURS)  # above the others
    figures = {}
    if trained:
        figures["recovery", "Figure 3"] = draw_recovery(replace(study.comparison, runs=trained))
    if hybrids:
        shown = replace(study.comparison, runs=hybrids)
        figures["zero_shot", "Tables 1 and 2 as a picture"] = draw_zero_shot(shown)
    if study.windows:
        figures["windows", "Figure 4"] = draw_windows(study)
    written = {}
    for (name, title), figure in figures.items():
        if figure is not None:
            figure.savefig(folder / f"{name}.png", format="png", metadata={"Software": None})
            written[f"{name}.png"] = title
    return written


def draw_far_apart(study: Study, ratios: list[float], folder: Path) -> dict[str, str]:
    """Figure 2: mean Jaccard distances over seeds."""
    panels = []
    for ratio in ratios:
        names = [name for name in (OURS, *STATIC) if (name, ratio) in study.cells]
        if len(names) > 1:
            values = np.full((len(names), len(names)), np.nan)
            for row, first in enumerate(names):
                for column, second in enumerate(names):
                    found = agreements(study, first, second, ratio)
                    if row != column and found:
                        values[row, column] = fmean(one.distance for one in found)
            panels.append(Triangles(f"ratio {ratio:g}", names, values))
    if not panels:
        return {}
    draw_distances(panels, "Jaccard distance of windowed groups", folder / "distances.png")
    return {"distances.png": "Figure 2"}


def draw_windows(study: Study) -> "Figure":
    """Figure 4: scores under other windows, the dense model as a line."""
    figure, axes = grid(len(study.comparison.averages))
    windows = sorted({row["window"] for row in study.windows})
    for axis, measure in zip(axes, study.comparison.averages, strict=True):
        rows = [row for row in study.windows if row["suite"] == measure.suite]
        for method, color in zip(study.trained, COLORS, strict=False):
            own = [row for row in rows if row["method"] == method]
            known = [w for w in windows if any(row["window"] == w for row in own)]
            means = [fmean(row["value"] for row in own if row["window"] == w) for w in known]
            axis.plot(list(map(windows.index, known)), means, "-o", color=color, ms=4, label=method)
        dense = study.dense_score(measure)
        if dense is not None:
            axis.axhline(dense, color="#444444", lw=1, ls=(0, (6, 2)), label="dense model")
        axis.set_xticks(range(len(windows)), list(map(str, windows)))
        axis.set(title=measure.title, xlabel="window, tokens", ylabel="score, %")
    return finish(figure, axes)
