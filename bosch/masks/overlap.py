"""How similar masks are, compared with random masks of the same ratios, and how their windowed
groups are distributed over depth.

A mask is treated as the set of its windowed groups (A in the paper): the Jaccard distance of
figures 2, 7 and 8 and the turnover of table 3 compare two such sets. The null model is exact: the
number of groups that random masks share follows a hypergeometric distribution.
"""

import math
from dataclasses import dataclass
from itertools import groupby

from bosch.masks.mask import GroupMask
from bosch.run.errors import UserError


def _distance(shared: int, num_first: int, num_second: int) -> float:
    """Jaccard's: 1 - |A and B| / |A or B|; 0 for two masks that window nothing."""
    either = num_first + num_second - shared
    return 1 - shared / either if either else 0.0


@dataclass(frozen=True)
class Agreement:
    """The windowed groups that two masks share, and how many random masks would share."""

    shared: int
    distance: float  # Jaccard's
    expected_shared: float
    expected_distance: float


def compare(first: GroupMask, second: GroupMask) -> Agreement:
    shapes = [(mask.num_layers, mask.num_groups) for mask in (first, second)]
    if shapes[0] != shapes[1]:
        text = " and ".join(f"{layers} layers x {groups} groups" for layers, groups in shapes)
        raise UserError(f"The masks have {text}; only masks of one model can be compared.")
    chances = overlap_chances(first, second)
    sizes = first.num_windowed, second.num_windowed
    rows = zip(first.z, second.z, strict=True)
    shared = sum(pair == (0, 0) for row in rows for pair in zip(*row, strict=True))
    return Agreement(
        shared=shared,
        distance=_distance(shared, *sizes),
        expected_shared=sizes[0] * sizes[1] / first.num_total,
        expected_distance=math.fsum(p * _distance(k, *sizes) for k, p in chances.items()),
    )


def overlap_chances(first: GroupMask, second: GroupMask) -> dict[int, float]:
    """Probability of each number of shared windowed groups if the second mask is drawn at random.
    If both masks choose whole layers, layers are drawn.
    """
    size = first.num_groups if first.unit == second.unit == "layer" else 1
    total, marked, drawn = (
        count // size for count in (first.num_total, first.num_windowed, second.num_windowed)
    )
    # Integers until the division, so that no factorial overflows.
    return {
        k * size: math.comb(marked, k)
        * math.comb(total - marked, drawn - k)
        / math.comb(total, drawn)
        for k in range(min(marked, drawn) + 1)
    }


@dataclass(frozen=True)
class Turnover:
    """How many windowed groups of a smaller ratio are full again at a larger one (table 3)."""

    raw: float  # T: share of the smaller mask's windowed groups that are full in the larger mask
    normalized: float | None  # T~: T divided by its maximum; None: the maximum is 0
    chance: float  # T of random masks
    normalized_chance: float | None


def turnover(smaller: GroupMask, larger: GroupMask) -> Turnover:
    num_smaller = smaller.num_windowed
    if not 0 < num_smaller <= larger.num_windowed:
        raise UserError(
            "Turnover goes from a ratio above 0 to an equal or larger one, not from "
            f"{smaller.ratio:g} to {larger.ratio:g}."
        )
    agreement = compare(smaller, larger)
    raw = (num_smaller - agreement.shared) / num_smaller
    chance = (num_smaller - agreement.expected_shared) / num_smaller
    most = min(num_smaller, larger.num_full) / num_smaller
    return Turnover(
        raw=raw,
        normalized=raw / most if most else None,
        chance=chance,
        normalized_chance=chance / most if most else None,
    )


def longest_blocks(mask: GroupMask) -> dict[str, tuple[int, ...]]:
    """For each kind, the layers of the longest run of neighboring layers (the first of several):
    full, fuller than the mask, windowed. Empty if no layer is of this kind.
    """
    shares, limit = mask.layer_ratios, mask.ratio - 1e-9
    kinds = {
        "full": [share == 0 for share in shares],
        "fuller than the mask": [share < limit for share in shares],
        "windowed": [share == 1 for share in shares],
    }
    blocks = {}
    for kind, flags in kinds.items():
        runs = groupby(range(mask.num_layers), key=flags.__getitem__)
        blocks[kind] = max((tuple(run) for flag, run in runs if flag), key=len, default=())
    return blocks
