"""Where over depth a mask has its windowed groups, how contiguous its full layers are, and whether
masks of rising ratio lie inside each other: the claims that ConSA makes of its masks."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bosch.masks.mask import GroupMask
from bosch.masks.overlap import (
    Group,
    distribution_of_common,
    mean_and_deviation,
    turnover,
    windowed_groups,
)

DRAWS = 10_000

# Which layers a block is made of, by each layer's share of windowed groups and the mask's ratio.
BLOCKS: dict[str, Callable[[NDArray[np.float64], float], NDArray[np.bool_]]] = {
    "full": lambda shares, ratio: shares == 0,
    "fuller than the mask": lambda shares, ratio: shares < ratio - 1e-9,
    "windowed": lambda shares, ratio: shares == 1,
}


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
    drawn = random_layer_ratios(mask, draws, seed)
    blocks = []
    for kind, is_of_kind in BLOCKS.items():
        flags = is_of_kind(np.array([mask.layer_ratios]), mask.ratio)
        lengths, ends = longest_runs(flags)
        length = int(lengths[0])
        chance, _ = longest_runs(is_of_kind(drawn, mask.ratio))
        deviation = float(chance.std())
        blocks.append(
            Block(
                kind=kind,
                first_layer=int(ends[0]) - length + 1 if length else None,
                num_layers=length,
                expected=float(chance.mean()),
                z=(length - float(chance.mean())) / deviation if deviation > 1e-9 else None,
            )
        )
    return blocks


def random_layer_ratios(mask: GroupMask, draws: int, seed: int) -> NDArray[np.float64]:
    """[draw, layer]: shares of windowed groups in random masks of the same ratio and unit."""
    generator = np.random.default_rng(seed)
    size = mask.num_groups if mask.unit == "group" else 1
    windowed = np.zeros((draws, mask.num_layers * size))
    windowed[:, : mask.num_windowed * size // mask.num_groups] = 1
    shuffled: NDArray[np.float64] = generator.permuted(windowed, axis=1)
    return shuffled.reshape(draws, mask.num_layers, size).mean(2)


def longest_runs(flags: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each row, the length of its longest run of True and where that (the first such) ends."""
    longest = np.zeros(len(flags), np.int64)
    ends = np.zeros(len(flags), np.int64)
    running = np.zeros(len(flags), np.int64)
    for layer in range(flags.shape[1]):
        running = np.where(flags[:, layer], running + 1, 0)
        ends = np.where(running > longest, layer, ends)
        longest = np.maximum(longest, running)
    return longest, ends


@dataclass(frozen=True)
class Nesting:
    """Masks of rising ratio. Nested: what is on the window stays there at every larger ratio."""

    kept: tuple[float, ...]  # step by step: share of windowed groups that stay windowed, 1 - T
    kept_by_chance: tuple[float, ...]
    returned: tuple[Group, ...]  # windowed at one ratio and full at a larger one
    core: tuple[Group, ...]  # full at every ratio
    core_expected: float  # their number if the masks were random
    core_z: float | None

    @property
    def is_nested(self) -> bool:
        return not self.returned


def nesting(masks: Sequence[GroupMask]) -> Nesting:
    steps = [turnover(smaller, larger) for smaller, larger in itertools.pairwise(masks)]
    sets = [windowed_groups(mask) for mask in masks]
    returned = {
        group for number, one in enumerate(sets) for later in sets[number:] for group in one - later
    }
    everything = {
        (layer, group)
        for layer in range(masks[0].num_layers)
        for group in range(masks[0].num_groups)
    }
    core = everything.difference(*sets)
    expected, deviation = _core_by_chance(masks)
    return Nesting(
        kept=tuple(1 - step.raw for step in steps),
        kept_by_chance=tuple(1 - step.chance for step in steps),
        returned=tuple(sorted(returned)),
        core=tuple(sorted(core)),
        core_expected=expected,
        core_z=(len(core) - expected) / deviation if deviation > 1e-9 else None,
    )


def _core_by_chance(masks: Sequence[GroupMask]) -> tuple[float, float]:
    """Mean and deviation of the number of groups that random masks of these ratios all leave full;
    of masks over whole layers, layers are drawn.
    """
    size = masks[0].num_groups if all(mask.unit == "layer" for mask in masks) else 1
    chances = distribution_of_common(
        masks[0].num_total // size, [mask.num_full // size for mask in masks]
    )
    numbers = np.arange(len(chances)) * size
    return mean_and_deviation(chances, numbers)


def share_of_masks(masks: Iterable[GroupMask]) -> NDArray[np.float64]:
    """[layer, group]: the share of the masks that have the group on the window."""
    share: NDArray[np.float64] = 1 - np.mean([mask.z for mask in masks], axis=0)
    return share
