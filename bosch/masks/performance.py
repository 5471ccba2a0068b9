"""Do masks that differ more also perform more differently? (section 4.2)

Pairs of masks are not independent of each other, so the p-value is that of a Mantel test: scores
are dealt anew to the masks, and it counts how often chance correlates as much.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 2_000


@dataclass(frozen=True)
class Comparable:
    """Masks that may be compared with each other: one model, one ratio."""

    distances: NDArray[np.float64]  # [mask, mask]
    scores: NDArray[np.float64]  # [mask]

    def pairs(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Distance and difference in score of each pair."""
        first, second = np.triu_indices(len(self.scores), k=1)
        return self.distances[first, second], np.abs(self.scores[first] - self.scores[second])


@dataclass(frozen=True)
class Correlation:
    """Of distances with differences in score, over all pairs of comparable masks. Several models or
    ratios differ in both alike, so ranks and deviations are those within each.
    """

    num_masks: int
    num_pairs: int
    spearman: float | None  # of ranks; None: all distances or all scores are the same
    pearson: float | None
    p_value: float | None  # chance that dealt scores correlate (Spearman) as much or more


def correlate(groups: Sequence[Comparable], draws: int = DRAWS, seed: int = 0) -> Correlation:
    pairs = [group.pairs() for group in groups]
    ranks = np.concatenate([rank(distances) for distances, _ in pairs])
    observed = pearson(ranks, np.concatenate([rank(differences) for _, differences in pairs]))
    p_value = None
    if observed is not None:
        generator = np.random.default_rng(seed)
        as_much = 1  # the scores as they are
        for _ in range(draws):
            dealt = [
                rank(Comparable(group.distances, generator.permutation(group.scores)).pairs()[1])
                for group in groups
            ]
            chance = pearson(ranks, np.concatenate(dealt))
            as_much += chance is not None and chance >= observed - 1e-12
        p_value = as_much / (draws + 1)
    centered = [[values - values.mean() for values in pair] for pair in pairs]
    return Correlation(
        num_masks=sum(len(group.scores) for group in groups),
        num_pairs=len(ranks),
        spearman=observed,
        pearson=pearson(*(np.concatenate([pair[side] for pair in centered]) for side in (0, 1))),
        p_value=p_value,
    )


def pearson(first: NDArray[np.float64], second: NDArray[np.float64]) -> float | None:
    """None where one of them does not vary."""
    x, y = first - first.mean(), second - second.mean()
    sizes = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / sizes if sizes > 1e-12 else None


def rank(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from -1 to 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middles = np.cumsum(counts) - (counts + 1) / 2  # of equal values' places, from 0
    spread = max(1, len(values) - 1)
    return (2 * middles[inverse] / spread) - 1 if len(values) > 1 else np.zeros(1)
