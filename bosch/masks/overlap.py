"""How much two masks agree, and how much two random ones would.

A mask stands for the set of its windowed groups (A in the paper): the Jaccard distance of figures
2, 7 and 8 and the turnover of table 3 compare two such sets. Beside each stands its value under a
null model, exactly: shared groups of random masks follow a hypergeometric distribution.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bosch.masks.mask import GroupMask

Group = tuple[int, int]  # layer, group

# What a random mask keeps of the real one: how much is windowed in all, or in each layer.
Null = Literal["total", "layers"]
NULLS: tuple[Null, ...] = ("total", "layers")


def windowed_groups(mask: GroupMask) -> frozenset[Group]:
    return frozenset(
        (layer, group)
        for layer, row in enumerate(mask.z)
        for group, bit in enumerate(row)
        if bit == 0
    )


def check_same_shape(first: GroupMask, second: GroupMask) -> None:
    shapes = [(mask.num_layers, mask.num_groups) for mask in (first, second)]
    if shapes[0] != shapes[1]:
        told = " and ".join(f"{layers} layers x {groups} groups" for layers, groups in shapes)
        raise ValueError(f"The masks have {told}; only masks of one model can be compared.")


def jaccard_distance(first: GroupMask, second: GroupMask) -> float:
    """1 - |A and B| / |A or B|; 0 for two masks that window nothing."""
    check_same_shape(first, second)
    a, b = windowed_groups(first), windowed_groups(second)
    return _distance(len(a & b), len(a), len(b))


def _distance(shared: int, num_first: int, num_second: int) -> float:
    either = num_first + num_second - shared
    return 1 - shared / either if either else 0.0


@dataclass(frozen=True)
class Agreement:
    """Windowed groups that two masks share, beside what random masks share."""

    shared: int
    distance: float  # Jaccard's
    expected_shared: float
    deviation: float  # standard deviation of shared groups
    expected_distance: float
    z: float | None  # deviations above the expected number; None: random masks cannot differ


def compare(first: GroupMask, second: GroupMask, null: Null = "total") -> Agreement:
    """Agreement of two masks, beside that of the first with random masks like the second."""
    check_same_shape(first, second)
    chances = overlap_distribution(first, second, null)
    numbers = np.arange(len(chances))
    expected, deviation = mean_and_deviation(chances, numbers)
    num_first, num_second = first.num_windowed, second.num_windowed
    distances = np.array([_distance(int(k), num_first, num_second) for k in numbers])
    shared = len(windowed_groups(first) & windowed_groups(second))
    return Agreement(
        shared=shared,
        distance=_distance(shared, num_first, num_second),
        expected_shared=expected,
        deviation=deviation,
        expected_distance=math.fsum(chances * distances),
        z=(shared - expected) / deviation if deviation > 1e-9 else None,
    )


def overlap_distribution(
    first: GroupMask, second: GroupMask, null: Null = "total"
) -> NDArray[np.float64]:
    """Chance of each number of shared windowed groups, from 0 to all there are, when the second
    mask is drawn at random. Of two masks over whole layers, layers are drawn.
    """
    if first.unit == second.unit == "layer" and null == "total":
        size = first.num_groups
        counts = [mask.num_windowed // size for mask in (first, second)]
        layers = hypergeometric(first.num_layers, counts[0], counts[1])
        chances = np.zeros(min(counts) * size + 1)
        chances[::size] = layers
        return chances
    if null == "total":
        return hypergeometric(first.num_total, first.num_windowed, second.num_windowed)
    chances = np.ones(1)
    for row, other in zip(first.z, second.z, strict=True):
        chances = np.convolve(
            chances, hypergeometric(first.num_groups, row.count(0), other.count(0))
        )
    return np.pad(chances, (0, min(first.num_windowed, second.num_windowed) + 1 - len(chances)))


def mean_and_deviation(
    chances: NDArray[np.float64], numbers: NDArray[np.int64]
) -> tuple[float, float]:
    """The same on every processor: with dot products, which add in an order of their own, 7/8 was
    printed as 87 % by some and as 88 % by others."""
    mean = math.fsum(chances * numbers)
    return mean, math.sqrt(math.fsum(chances * (numbers - mean) ** 2))


def hypergeometric(total: int, marked: int, drawn: int) -> NDArray[np.float64]:
    """Chance of each number of marked ones, 0 to min(marked, drawn), among those drawn of a total.
    Whole numbers until the last division: no factorial overflows.
    """
    ways = [
        math.comb(marked, k) * math.comb(total - marked, drawn - k)
        for k in range(min(marked, drawn) + 1)
    ]
    return np.array([way / math.comb(total, drawn) for way in ways])


@dataclass(frozen=True)
class Turnover:
    """How much a larger ratio gives up of what a smaller one had on the window (table 3)."""

    raw: float  # T: share of the smaller mask's windowed groups that are full in the larger
    normalized: float | None  # T~: T over the most it can be; None: it can only be 0
    chance: float  # T of random masks
    normalized_chance: float | None
    z: float | None  # deviations of T above chance: below 0 where masks agree


def turnover(smaller: GroupMask, larger: GroupMask) -> Turnover:
    num_smaller, num_full = smaller.num_windowed, larger.num_full
    if num_smaller == 0:
        raise ValueError("Turnover asks what becomes of windowed groups; the mask has none.")
    if num_smaller > larger.num_windowed:
        raise ValueError(
            f"Turnover goes from the smaller ratio to the larger, not from {smaller.ratio:g} to "
            f"{larger.ratio:g}."
        )
    agreement = compare(smaller, larger)
    raw = (num_smaller - agreement.shared) / num_smaller
    chance = (num_smaller - agreement.expected_shared) / num_smaller
    most = min(num_smaller, num_full) / num_smaller
    return Turnover(
        raw=raw,
        normalized=raw / most if most else None,
        chance=chance,
        normalized_chance=chance / most if most else None,
        z=None if agreement.z is None else -agreement.z,
    )


def distribution_of_common(total: int, sizes: Sequence[int]) -> NDArray[np.float64]:
    """Chance of each number of members common to random sets of these sizes, 0 to the smallest."""
    chances = np.zeros(min(sizes) + 1)
    first, *others = sizes
    held = {first: 1.0}  # how many are left after each further set, and how likely
    for size in others:
        left: dict[int, float] = {}
        for marked, chance in held.items():
            for k, share in enumerate(hypergeometric(total, marked, size)):
                left[k] = left.get(k, 0.0) + chance * float(share)
        held = left
    for number, chance in held.items():
        chances[number] = chance
    return chances
