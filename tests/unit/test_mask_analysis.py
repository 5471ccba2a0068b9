"""Analyses of masks: values worked by hand, the paper's table 3, and null models against
simulation."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given

from bosch.masks.analysis import (
    compare,
    longest_blocks,
    overlap_chances,
    replace_groups,
    turnover,
)
from bosch.masks.mask import GroupMask
from bosch.run.errors import UserError
from tests.masks import masks


def mask_of(*rows: str, unit: str = "group") -> GroupMask:
    return GroupMask.from_rows(rows, 16, unit)  # type: ignore[arg-type]


def random_mask(num_layers: int, num_groups: int, windowed: int, seed: int) -> GroupMask:
    everything = list(itertools.product(range(num_layers), range(num_groups)))
    chosen = random.Random(seed).sample(everything, windowed)
    return GroupMask.from_windowed(chosen, num_layers, num_groups, 16)


# --- overlap ---


def test_distance_is_one_minus_shared_over_either() -> None:
    first, second = mask_of("0011", "1101"), mask_of("0101", "1111")
    # Windowed: {00, 01, 12} and {00, 02}; one shared of four.
    assert compare(first, second).distance == 0.75
    assert compare(first, first).distance == 0
    assert compare(mask_of("11"), mask_of("11")).distance == 0
    assert compare(mask_of("11"), mask_of("01")).distance == 1
    with pytest.raises(UserError, match="1 layers x 2 groups and 2 layers x 2 groups"):
        compare(mask_of("01"), mask_of("01", "01"))


@pytest.mark.parametrize(
    ("ratios", "raw", "normalized"),
    [  # T and T~ of table 3, in per cent: 1.7B, 8B and 1.7B
        ((0.25, 0.5), 30, 30),
        ((0.5, 0.75), 15, 30),
        ((0.75, 0.875), 6, 36),
    ],
)
def test_normalized_turnover_agrees_with_table_3(
    ratios: tuple[float, float], raw: float, normalized: float
) -> None:
    total = 28 * 8
    num_smaller, num_larger = (round(ratio * total) for ratio in ratios)
    given_up = round(raw / 100 * num_smaller)
    places = [divmod(number, 8) for number in range(total)]
    smaller = GroupMask.from_windowed(places[:num_smaller], 28, 8, 16)
    larger = GroupMask.from_windowed(places[given_up : given_up + num_larger], 28, 8, 16)
    measured = turnover(smaller, larger)
    assert 100 * measured.raw == pytest.approx(raw, abs=0.5)
    assert measured.normalized is not None
    assert 100 * measured.normalized == pytest.approx(
        normalized, abs=2
    )  # T is rounded in the table
    # Random masks: 1 - the larger ratio.
    assert measured.chance == pytest.approx(1 - ratios[1])
    assert measured.normalized_chance == pytest.approx({0.875: 0.75}.get(ratios[1], 0.5))


def test_turnover_of_what_cannot_turn_over() -> None:
    measured = turnover(mask_of("0011"), mask_of("0000"))
    assert (measured.raw, measured.normalized) == (0, None)
    with pytest.raises(UserError, match=r"not from 0\.5 to 0\.25"):
        turnover(mask_of("0011"), mask_of("0111"))
    with pytest.raises(UserError, match=r"not from 0 to 0\.25"):
        turnover(mask_of("1111"), mask_of("0111"))


def test_the_chance_of_an_overlap_counts_all_draws() -> None:
    drawn = [len({0, 1, 2} & set(draw)) for draw in itertools.combinations(range(7), 4)]
    counts = np.bincount(drawn, minlength=4) / len(drawn)
    measured = overlap_chances(mask_of("0001111"), mask_of("0000111"))
    np.testing.assert_allclose(list(measured.values()), counts)
    # Qwen3 14B and more: no overflow.
    large = (random_mask(48, 8, windowed, seed=0) for windowed in (192, 336))
    assert sum(overlap_chances(*large).values()) == pytest.approx(1)


@given(masks(), masks())
def test_comparison_is_symmetric_and_bounded(first: GroupMask, second: GroupMask) -> None:
    if (first.num_layers, first.num_groups) != (second.num_layers, second.num_groups):
        with pytest.raises(UserError, match="one model"):
            compare(first, second)
        return
    measured, back = compare(first, second), compare(second, first)
    assert measured.distance == back.distance
    assert measured.expected_shared == pytest.approx(back.expected_shared)
    assert 0 <= measured.distance <= 1


def test_masks_over_layers_are_compared_with_drawn_layers() -> None:
    first = mask_of("000", "111", "000", "111", unit="layer")
    second = mask_of("000", "111", "111", "111", unit="layer")
    # One of four layers is drawn, half of them windowed in the first: 3 groups or none.
    assert overlap_chances(first, second) == {0: 0.5, 3: 0.5}


# --- depth ---


def test_longest_blocks_of_layers() -> None:
    measured = mask_of("1111", "0111", "1111", "1111", "0000", "0000", "0001", "1000")
    # The mask's ratio is 15 of 32: layers with one windowed group or none are fuller.
    blocks = {"full": (2, 3), "fuller than the mask": (0, 1, 2, 3), "windowed": (4, 5)}
    assert longest_blocks(measured) == blocks
    assert longest_blocks(mask_of("01", "10"))["full"] == ()


# --- the replacement test ---


def test_groups_of_the_smaller_ratio_are_swapped_in() -> None:
    """A' of the paper's C.1: the larger mask keeps its size and takes over all that it lacked."""

    def windowed(mask: GroupMask) -> set[tuple[int, int]]:
        return {(l, g) for l, row in enumerate(mask.z) for g, bit in enumerate(row) if not bit}

    smaller, larger = random_mask(6, 4, 8, seed=1), random_mask(6, 4, 14, seed=5)
    incoming = windowed(smaller) - windowed(larger)
    assert incoming
    swapped = [replace_groups(smaller, larger, seed) for seed in range(3)]
    for mask, count in swapped:
        assert (count, mask.num_windowed) == (len(incoming), larger.num_windowed)
        assert windowed(mask) - windowed(larger) == incoming
    assert len({mask for mask, _ in swapped}) > 1
    assert replace_groups(smaller, larger, 0) == swapped[0]
    layers = (mask_of("00", "11", "11", "11", unit="layer"),
              mask_of("11", "00", "00", "11", unit="layer"))  # fmt: skip
    mask, count = replace_groups(*layers, seed=0)
    assert (count, mask.unit, mask.num_windowed, mask.z[0]) == (1, "layer", 4, (0, 0))
