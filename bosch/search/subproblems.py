"""The subproblems of BOSCH's stage 3: layers of equal ratio, split into parts small enough for an
optimizer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bosch.masks.mask import check_ratio, num_windowed
from bosch.run.errors import UserError

MAX_VARIABLES = 32  # per part by default: 4 layers of 8 groups in the paper


@dataclass(frozen=True)
class Subproblem:
    """Which `num_windowed` of the groups of some layers get the window."""

    layers: tuple[int, ...]  # ascending
    ratio: float
    num_windowed: int  # in all these layers: single ones may deviate from the ratio
    evaluations: int  # 0 (nothing to choose), the number of candidates, or kappa x layers


def plan_subproblems(
    ratios: Sequence[float], num_groups: int, kappa: int = 100, max_layers: int | None = None
) -> tuple[Subproblem, ...]:
    """The subproblems in the order in which stage 3 solves them: larger ratios first, and within a
    ratio from the bottom up.

    Layers of one ratio are split by depth into the fewest parts of at most `max_layers` (None: 32
    groups), whose sizes differ by at most one, larger parts first. Splitting by depth avoids
    recomputing the layers below a part for each candidate. Each part gets `kappa` evaluations per
    layer; if it has no more candidates than that, all are tried.
    """
    for name, value in (("num_groups", num_groups), ("kappa", kappa), ("max_layers", max_layers)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}, it must be at least 1.")
    shares = [float(ratio) for ratio in ratios]
    for share in shares:
        check_ratio(share)
    most = max(1, MAX_VARIABLES // num_groups) if max_layers is None else max_layers
    return tuple(
        _describe(layers, ratio, num_groups, kappa)
        for ratio in sorted(set(shares), reverse=True)
        for layers in cut([layer for layer, share in enumerate(shares) if share == ratio], most)
    )


def cut(layers: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Split into the fewest parts of at most `most`; sizes differ by at most one, larger first."""
    num_parts = -(-len(layers) // most)
    size, larger = divmod(len(layers), num_parts)
    bounds = [part * size + min(part, larger) for part in range(num_parts + 1)]
    return [tuple(layers[a:b]) for a, b in pairwise(bounds)]


def _describe(layers: tuple[int, ...], ratio: float, num_groups: int, kappa: int) -> Subproblem:
    quota = num_windowed(ratio, len(layers), num_groups)
    candidates = math.comb(len(layers) * num_groups, quota)
    evaluations = min(candidates, kappa * len(layers)) if candidates > 1 else 0
    return Subproblem(layers, ratio, quota, evaluations)
