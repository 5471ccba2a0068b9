"""Replicates of a curve: what its scores might have been on other examples.

Where the scores of single examples are there, examples are drawn with replacement, the same ones
for the dense model, every checkpoint and every run that answered them (a paired bootstrap: what is
hard for all of them cancels out). Else each point is drawn by itself from its standard error.
"""

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from eval.report.recovery import Numbers, Replicates

NUM_REPLICATES = 2000
PAIRED = "paired bootstrap over examples"
FROM_ERRORS = "from standard errors, points drawn independently"

Cell = tuple[str, int]  # task, length
Samples = Mapping[Cell, Mapping[int, float]]  # scores of single examples by their index, percent


def resample_examples(
    points: Sequence[Samples], dense: Samples | None, weights: Mapping[Cell, float], suite: str
) -> Replicates | None:
    """Replicates of sum(weight x mean over the cell's examples). None where a point lacks a cell,
    or has one example of it, which drawn anew is always itself, or not all points answered the
    same examples."""
    models = [*points, dense] if dense is not None else list(points)
    total = np.zeros((NUM_REPLICATES, len(models)))
    for cell, weight in weights.items():
        cells = [model.get(cell, {}) for model in models]
        indexes = sorted(cells[0])
        if len(indexes) < 2 or any(sorted(scores) != indexes for scores in cells):
            return None
        scores = np.array([[scores[index] for index in indexes] for scores in cells])
        # By its name, so that every run draws the same examples of a cell.
        generator = _generator(suite, *cell, len(indexes))
        share = np.full(len(indexes), 1 / len(indexes))
        counts = generator.multinomial(len(indexes), share, NUM_REPLICATES)
        total += weight * counts @ scores.T / len(indexes)
    last = total[:, -1] if dense is not None else np.full(NUM_REPLICATES, math.nan)
    return Replicates(total[:, : len(points)], last, PAIRED)


def draw_from_errors(
    values: Numbers, stderrs: Numbers, dense: float, dense_stderr: float, measure: str, run: str
) -> Replicates | None:
    """Normal draws around each point, others for each run; the dense model's are the same for all.
    None where a standard error is unknown."""
    has_dense = not math.isnan(dense)
    if np.isnan(stderrs).any() or (has_dense and math.isnan(dense_stderr)):
        return None
    drawn = _generator(measure, run).normal(values, stderrs, (NUM_REPLICATES, len(values)))
    last = np.full(NUM_REPLICATES, math.nan)
    if has_dense:
        last = _generator(measure, "dense").normal(dense, dense_stderr, NUM_REPLICATES)
    return Replicates(drawn, last, FROM_ERRORS)


def _generator(*names: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32("/".join(map(str, names)).encode()))
