"""The parts of serving/vllm that need no vLLM: how heads are packed, and what is refused."""

import re
from typing import Any

import pytest
from bosch_vllm.packing import Packing, heads_in_a_block, pack_blocks, pack_units, share_of_dense
from bosch_vllm.refusals import check_hybrid, check_version
from hypothesis import assume, given
from hypothesis import strategies as st

HYBRID: dict[str, Any] = {"window": 64, "num_full": [1, 0, 4]}


@pytest.mark.parametrize(
    ("num_full", "num_groups", "unit"),
    [([1, 0, 4], 4, 1), ([2, 4, 0], 4, 2), ([8, 0, 8], 8, 8), ([0, 0], 4, 4), ([3, 6], 8, 1)],
)
def test_all_heads_are_in_equal_modules(num_full: list[int], num_groups: int, unit: int) -> None:
    packing = pack_units(num_full, num_groups)
    assert heads(packing, "full") == num_full
    assert heads(packing, "window") == [num_groups - n for n in num_full]
    assert {size for pieces in packing for size in pieces.values()} == {unit}
    assert sum(map(len, packing)) == len(num_full) * num_groups // unit


def heads(packing: Packing, kind: str) -> list[int]:
    """Of each layer. Full heads come first, as in the weights."""
    for pieces in packing:
        kinds = [name.startswith("window") for name in pieces]
        assert kinds == sorted(kinds)
    return [sum(n for name, n in pieces.items() if name.startswith(kind)) for pieces in packing]


@given(
    num_full=st.lists(st.integers(0, 8), min_size=1, max_size=12),
    kept=st.integers(1, 300),
    tokens=st.integers(1, 3000),
)
def test_blocks_hold_every_head_once_in_order(num_full: list[int], kept: int, tokens: int) -> None:
    assume(any(n < 8 for n in num_full))
    packing = pack_blocks(num_full, 8, kept, tokens)
    num_window = [8 - n for n in num_full]
    assert heads(packing, "full") == num_full
    assert heads(packing, "window") == num_window
    capacity = heads_in_a_block(sum(num_full), sum(num_window), kept, tokens)
    filled: dict[str, list[int]] = {"full": [], "window": []}
    for name, size in (piece for pieces in packing for piece in pieces.items()):
        assert size > 0
        kind, number = name.split("_block")
        filled[kind] += [int(number)] * size
    for blocks in filled.values():  # in the order of layers, and none but the last has room
        assert blocks == [at // capacity for at in range(len(blocks))]


def test_share_of_dense_counts_window_entries() -> None:
    # By hand: of 8 groups 2 keep 100 entries and 6 keep 9: (200 + 54) / 800.
    assert share_of_dense([1, 1], 4, window=10, tokens=100) == pytest.approx(0.3175)
    assert share_of_dense([1, 1], 4, window=10, tokens=5) == 1


def test_another_vllm_is_refused() -> None:
    for version in ("0.32.0", "0.32.1.post1+cpu"):
        check_version(version)
    for version in ("0.31.2", "0.3.2", "dev"):
        with pytest.raises(ValueError, match=re.escape(f"this is {version};")):
            check_version(version)


@pytest.mark.parametrize(
    ("hybrid", "told"),
    [
        (None, "another version"),
        ({**HYBRID, "num_full": [1, 0]}, "another version"),
        ({**HYBRID, "num_full": [4, 4, 4]}, "nothing would be saved"),
        ({**HYBRID, "sink": {"kind": "tokens", "tokens": 4}}, "serves static sinks, and none"),
        ({**HYBRID, "sink": "static"}, "serves static sinks, and none"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(hybrid: Any, told: str) -> None:
    check_hybrid(HYBRID, 3, 4)
    check_hybrid({**HYBRID, "sink": {"kind": "static"}}, 3, 4)
    with pytest.raises(ValueError, match=told):
        check_hybrid(hybrid, 3, 4)
