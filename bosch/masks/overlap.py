"""What masks have in common, beside what random masks of the same ratios would have.

A mask stands for the set of its windowed groups (A in the paper): the Jaccard distance of figures
2, 7 and 8 and the turnover of table 3 compare two such sets. The null model is exact: shared groups
of random masks follow a hypergeometric distribution.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bosch.masks.mask import GroupMask

Group = tuple[int, int]  # layer, group


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
    shared = len(windowed_groups(first) & windowed_groups(second))
    return _distance(shared, first.num_windowed, second.num_windowed)


def _distance(shared: int, num_first: int, num_second: int) -> float:
    either = num_first + num_second - shared
    return 1 - shared / either if either else 0.0


@dataclass(frozen=True)
class Agreement:
    """Windowed groups that two masks share, beside what random masks of their ratios share."""

    shared: int
    distance: float  # Jaccard's
    expected_shared: float
    deviation: float  # standard deviation of shared groups
    expected_distance: float
    z: float | None  # deviations above the expected number; None: random masks cannot differ


def compare(first: GroupMask, second: GroupMask) -> Agreement:
    check_same_shape(first, second)
    chances = overlap_distribution(first, second)
    expected, deviation = _mean_and_deviation(chances)
    sizes = first.num_windowed, second.num_windowed
    shared = len(windowed_groups(first) & windowed_groups(second))
    return Agreement(
        shared=shared,
        distance=_distance(shared, *sizes),
        expected_shared=expected,
        deviation=deviation,
        expected_distance=math.fsum(p * _distance(k, *sizes) for k, p in enumerate(chances)),
        z=(shared - expected) / deviation if deviation > 1e-9 else None,
    )


def overlap_distribution(first: GroupMask, second: GroupMask) -> NDArray[np.float64]:
    """Chance of each number of shared windowed groups, from 0 to all there are, when the second
    mask is drawn at random. Of two masks over whole layers, layers are drawn.
    """
    size = first.num_groups if first.unit == second.unit == "layer" else 1
    total, marked, drawn = (
        count // size for count in (first.num_total, first.num_windowed, second.num_windowed)
    )
    chances = np.zeros(min(marked, drawn) * size + 1)
    for k in range(min(marked, drawn) + 1):
        # Whole numbers until the last division: no factorial overflows.
        ways = math.comb(marked, k) * math.comb(total - marked, drawn - k)
        chances[k * size] = ways / math.comb(total, drawn)
    return chances


def _mean_and_deviation(chances: NDArray[np.float64]) -> tuple[float, float]:
    """The same on every processor: with dot products, which add in an order of their own, 7/8 was
    printed as 87 % by some and as 88 % by others."""
    numbers = np.arange(len(chances))
    mean = math.fsum(chances * numbers)
    return mean, math.sqrt(math.fsum(chances * (numbers - mean) ** 2))


@dataclass(frozen=True)
class Turnover:
    """How much a larger ratio gives up of what a smaller one had on the window (table 3)."""

    raw: float  # T: share of the smaller mask's windowed groups that are full in the larger
    normalized: float | None  # T~: T over the most it can be; None: it can only be 0
    chance: float  # T of random masks
    normalized_chance: float | None
    z: float | None  # deviations of T above chance: below 0 where masks agree


def turnover(smaller: GroupMask, larger: GroupMask) -> Turnover:
    num_smaller = smaller.num_windowed
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
    most = min(num_smaller, larger.num_full) / num_smaller
    return Turnover(
        raw=raw,
        normalized=raw / most if most else None,
        chance=chance,
        normalized_chance=chance / most if most else None,
        z=None if agreement.z is None else -agreement.z,
    )


# -------------------------------------------------------------------------------------- over depth

DRAWS = 10_000
KINDS = ("full", "fuller than the mask", "windowed")  # layers, by their windowed groups


@dataclass(frozen=True)
class Block:
    """The longest run of neighboring layers of a kind, beside that of random masks."""

    kind: str
    first_layer: int | None  # None: no layer is of this kind
    num_layers: int
    expected: float
    z: float | None  # None: in random masks the length never differs


def longest_blocks(mask: GroupMask, draws: int = DRAWS, seed: int = 0) -> list[Block]:
    """One for each kind. Random masks have the mask's ratio and unit; their blocks have no simple
    formula, so `draws` of them are made.
    """
    own = np.array([mask.layer_ratios])
    drawn = _random_layer_ratios(mask, draws, seed)
    blocks = []
    for kind in KINDS:
        (length,), (end,) = _longest_runs(_is_of_kind(kind, own, mask.ratio))
        lengths, _ = _longest_runs(_is_of_kind(kind, drawn, mask.ratio))
        expected, deviation = float(lengths.mean()), float(lengths.std())
        first = int(end - length) + 1 if length else None
        z = (int(length) - expected) / deviation if deviation > 1e-9 else None
        blocks.append(Block(kind, first, int(length), expected, z))
    return blocks


def _is_of_kind(kind: str, shares: NDArray[np.float64], ratio: float) -> NDArray[np.bool_]:
    kinds = (shares == 0, shares < ratio - 1e-9, shares == 1)
    return kinds[KINDS.index(kind)]


def _random_layer_ratios(mask: GroupMask, draws: int, seed: int) -> NDArray[np.float64]:
    """[draw, layer]: shares of windowed groups in random masks of the same ratio and unit."""
    size = mask.num_groups if mask.unit == "group" else 1
    windowed = np.zeros((draws, mask.num_layers * size))
    windowed[:, : mask.num_windowed * size // mask.num_groups] = 1
    shuffled: NDArray[np.float64] = np.random.default_rng(seed).permuted(windowed, axis=1)
    return shuffled.reshape(draws, mask.num_layers, size).mean(2)


def _longest_runs(flags: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each row, the length of its longest run of True and where that (the first such) ends."""
    longest, ends, running = np.zeros((3, len(flags)), np.int64)
    for layer in range(flags.shape[1]):
        running = np.where(flags[:, layer], running + 1, 0)
        ends = np.where(running > longest, layer, ends)
        longest = np.maximum(longest, running)
    return longest, ends
