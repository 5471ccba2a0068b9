"""The parts of serving/vllm that need no vLLM: how heads are packed, and what is refused."""

import re
from typing import Any

import pytest
from bosch_vllm.packing import pack_units, share_of_dense
from bosch_vllm.refusals import check_block, check_hybrid, check_setting, check_version

HYBRID: dict[str, Any] = {"window": 64, "num_full": [1, 0, 4]}


@pytest.mark.parametrize(
    ("num_full", "num_groups", "unit"),
    [([1, 0, 4], 4, 1), ([2, 4, 0], 4, 2), ([8, 0, 8], 8, 8), ([0, 0], 4, 4), ([3, 6], 8, 1)],
)
def test_every_head_is_in_one_module_of_equal_size(
    num_full: list[int], num_groups: int, unit: int
) -> None:
    packing = pack_units(num_full, num_groups)
    assert [sum(pieces) for pieces in packing.full] == num_full
    assert [sum(pieces) for pieces in packing.window] == [num_groups - n for n in num_full]
    sizes = [size for pieces in packing.full + packing.window for size in pieces]
    assert set(sizes) == {unit}
    assert packing.num_modules == len(num_full) * num_groups // unit


def test_share_of_dense_counts_window_entries() -> None:
    # By hand: of 8 groups 2 keep 100 entries and 6 keep 9: (200 + 54) / 800.
    assert share_of_dense([1, 1], 4, window=10, tokens=100) == pytest.approx(0.3175)
    assert share_of_dense([1, 1], 4, window=10, tokens=5) == 1


def test_another_vllm_is_refused() -> None:
    check_version("0.32.0")
    check_version("0.32.1.post1+cpu")
    for version in ("0.31.2", "0.33.0", "0.3.2", "1.32.0", "dev"):
        with pytest.raises(ValueError, match=re.escape(f"this is {version};")):
            check_version(version)


@pytest.mark.parametrize(
    ("hybrid", "told"),
    [
        (None, "another version"),
        ({}, "another version"),
        ({**HYBRID, "num_full": [1, 0]}, "another version"),
        ({**HYBRID, "num_full": [1, 0, 5]}, "another version"),
        ({**HYBRID, "window": 0}, "another version"),
        ({**HYBRID, "window": None}, "another version"),
        ({**HYBRID, "num_full": [4, 4, 4]}, "nothing would be saved"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(hybrid: Any, told: str) -> None:
    check_hybrid(HYBRID, 3, 4)
    with pytest.raises(ValueError, match=told):
        check_hybrid(hybrid, 3, 4)


def test_a_setting_and_a_block_size_are_refused_by_name() -> None:
    check_setting("LoRA", False, "not run")
    with pytest.raises(ValueError, match="with LoRA: not run"):
        check_setting("LoRA", True, "not run")
    check_block(32, True, "CPU_ATTN")
    with pytest.raises(ValueError, match="--block-size 24 does not fit"):
        check_block(24, False, "CPU_ATTN")
