"""The parts of serving/vllm that need no vLLM: how heads are packed, and what is refused."""

import re
from typing import Any

import pytest
from bosch_vllm import FAMILIES
from bosch_vllm.packing import (
    BLOCKS_FIRST,
    MOST_HEADS,
    Packing,
    block_of,
    choose_layout,
    greatest_unit,
    heads_in_a_block,
    held_entries,
    most_groups,
    number_type,
    order_for_ranks,
    pack_blocks,
    pack_units,
    share_of_dense,
    share_out,
    why_not_packed,
)
from bosch_vllm.refusals import check_engine, check_hybrid
from hypothesis import assume, given
from hypothesis import strategies as st

from bosch.plugins import list_plugins, load_plugin

HYBRID: dict[str, Any] = {"window": 64, "num_full": [1, 0, 4]}


@pytest.mark.parametrize(
    ("num_full", "num_groups", "unit"), [([1, 0, 4], 4, 1), ([2, 4, 0], 4, 2), ([8, 0, 8], 8, 8)]
)
def test_all_heads_are_in_equal_modules(num_full: list[int], num_groups: int, unit: int) -> None:
    packing = pack_units(num_full, num_groups, unit)
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
    most=st.sampled_from([None, 1, 2, 3, 6]),
)
def test_blocks_hold_every_head_once_in_order(
    num_full: list[int], kept: int, tokens: int, most: int | None
) -> None:
    assume(any(n < 8 for n in num_full))
    packing = pack_blocks(num_full, 8, kept, tokens, most)
    num_window = [8 - n for n in num_full]
    assert heads(packing, "full") == num_full
    assert heads(packing, "window") == num_window
    capacity = heads_in_a_block(sum(num_full), sum(num_window), kept, tokens)
    filled: dict[str, list[int]] = {"full": [], "window": []}
    for name, size in (piece for pieces in packing for piece in pieces.items()):
        assert 0 < size <= (most if most and name.startswith("window") else 8)
        kind = name.rstrip("_0123456789")
        filled[kind] += [int(block_of(name).removeprefix(kind))] * size
    for blocks in filled.values():  # in the order of layers, and none but the last has room
        assert blocks == [at // capacity for at in range(len(blocks))]
    for name in {block_of(name) for pieces in packing for name in pieces}:
        held = [n for pieces in packing for key, n in pieces.items() if block_of(key) == name]
        often = {size: held.count(size) for size in held}
        assert len(often) == 1 or len(set(often.values())) > 1  # vLLM would split it up


@given(
    num_full=st.lists(st.integers(0, 8), min_size=1, max_size=12), ranks=st.sampled_from([1, 2, 4])
)
def test_ranks_get_equal_parts_of_both_kinds(num_full: list[int], ranks: int) -> None:
    shares = share_out(num_full, ranks)
    totals = [sum(share) for share in shares]
    assert max(totals) - min(totals) <= 1
    for layer, count in enumerate(num_full):
        parts = [share[layer] for share in shares]
        assert sum(parts) == count
        order = order_for_ranks(count, parts, 8)
        assert sorted(order) == list(range(8))
        for rank, part in enumerate(parts):
            mine = order[rank * 8 // ranks : (rank + 1) * 8 // ranks]
            assert mine == sorted(mine)
            assert sum(group < count for group in mine) == part


@pytest.mark.parametrize("per_kv", [1, 4, 5, 8, 16, 32])
def test_no_window_with_static_sinks_has_more_heads_than_gpus_take(per_kv: int) -> None:
    """Each of its query heads is there twice. Qwen3-14B has 5 a group, so 7 groups would be 70."""
    most = most_groups(per_kv)
    for num_full in ([0, 0], [1, 0, 4, 8], [1] * 40):
        blocks = pack_blocks(num_full, 8, kept=1039, tokens=32_768, most=most)
        sizes = [n for pieces in blocks for key, n in pieces.items() if key.startswith("window")]
        assert 2 * per_kv * max(sizes) <= MOST_HEADS
    assert max(sizes) == min(7, most)
    unit = greatest_unit([[8, 0, 8]], 8, most)
    assert 2 * per_kv * unit <= MOST_HEADS < 2 * per_kv * 2 * unit or unit == 8


def test_modules_of_units_divide_the_counts_of_all_ranks() -> None:
    assert greatest_unit([[8, 0], [4, 8]], 8, None) == 4
    assert greatest_unit([[8, 0], [4, 8]], 8, 3) == 2
    assert greatest_unit([[6, 0]], 6, 5) == 3  # as 4 and 5 divide no 6
    assert not most_groups(33)  # which settings.py refuses


@pytest.mark.parametrize(
    ("asked", "like_gpus", "lacking", "found"),
    [
        (None, False, None, ("units", "the default on CPUs")),
        (None, False, "ranks", ("units", "the default on CPUs")),
        (None, True, None, ("packed", "the default on GPUs")),
        (None, True, "ranks", ("units", "ranks")),
        ("units", True, None, ("units", "as asked")),
        ("packed", False, None, ("packed", "as asked")),
        ("packed", True, "ranks", ("units", "ranks")),
    ],
)
def test_gpus_get_packed_where_it_runs_and_an_explicit_layout_wins(
    asked: str | None, like_gpus: bool, lacking: str | None, found: tuple[str, str]
) -> None:
    assert choose_layout(asked, like_gpus, lacking) == found


def test_packed_runs_where_the_cache_can_have_blocks_first() -> None:
    for named in (None, *BLOCKS_FIRST):
        assert why_not_packed([2, 4], 2, named, None) is None
    assert why_not_packed([2, 4], 1, None, ["LBHNC", "BLHNC"]) is None  # FlashInfer on Blackwell
    for arguments, told in (
        (([2, 3], 2, None, None), "whose full groups 2 ranks share equally"),
        (([2, 4], 2, "NHD", None), "BLHNC or BLNHC, and it is NHD"),
        (([2, 4], 2, None, ["LBNHC"]), "and the attention backend has LBNHC"),  # FlexAttention
        (([2, 4], 2, "BLNHC", ["BLHNC"]), "and the attention backend has BLHNC"),
    ):
        assert told in str(why_not_packed(*arguments))
    own = why_not_packed([2, 0], 1, None, None, has_own_windows=True)
    assert own == "packed needs layers without windows of their own"


def test_numbers_have_the_type_that_each_backend_reads() -> None:
    gpus = {name: number_type(name, True) for name in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")}
    assert gpus == {"FLASH_ATTN": "bfloat16", "TRITON_ATTN": "bfloat16", "FLASHINFER": "float32"}
    assert number_type("CPU_ATTN", like_gpus=False) == "float32"


def test_share_of_dense_counts_window_entries() -> None:
    # By hand: of 8 groups 2 keep 100 entries and 6 keep 9: (200 + 54) / 800.
    assert share_of_dense([1, 1], 4, window=10, tokens=100) == pytest.approx(0.3175)
    assert share_of_dense([1, 1], 4, window=10, tokens=5) == 1
    # A layer with a window of its own has it in the dense model too: (100 + 3 x 9 + 4 x 19) / 476.
    owns = [None, 20]
    assert share_of_dense([1, 0], 4, 10, tokens=100, owns=owns) == pytest.approx(203 / 476)


@given(
    window=st.integers(1, 300), block=st.sampled_from([16, 32, 128]), tokens=st.integers(1, 2000)
)
def test_blocks_of_a_window_hold_it_and_at_most_two_blocks_more(
    window: int, block: int, tokens: int
) -> None:
    def held(full: int, windowed: int) -> int:
        return held_entries(full, windowed, window, block, tokens)

    assert tokens <= held(1, 0) < tokens + block
    assert min(window, tokens) <= held(0, 1) <= min(held(1, 0), window + 2 * (block - 1))
    assert held(2, 3) == 2 * held(1, 0) + 3 * held(0, 1)


def test_another_vllm_is_refused_where_it_lacks_something() -> None:
    there = ("json:JSONDecoder.decode", "math:gcd")
    for version in ("0.31.0", "0.32.0", "0.32.1.post1+cpu"):
        assert check_engine(version, there) is None
    for version in ("0.30.2", "0.33.0", "dev"):
        assert f"this is {version}" in str(check_engine(version, there))
        told = f"0.31, 0.32 only, and this is {version}, which lacks json.Decoder, no.module.thing"
        with pytest.raises(ValueError, match=re.escape(told)):
            check_engine(version, (*there, "json:Decoder", "no.module:thing"))


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
    check_hybrid(HYBRID, 3, 4, ["full_attention"] * 3)
    own = ["full_attention", "sliding_attention", "full_attention"]
    check_hybrid({**HYBRID, "num_full": [4, 0, 3]}, 3, 4, own)
    with pytest.raises(ValueError, match="no group of this hybrid is on the window"):
        check_hybrid({**HYBRID, "num_full": [4, 0, 4]}, 3, 4, own)
    with pytest.raises(ValueError, match=told):
        check_hybrid(hybrid, 3, 4)


def test_every_family_is_served_or_refused_by_name() -> None:
    families = (load_plugin("bosch.families", name) for name in list_plugins("bosch.families"))
    assert {family.model_class.__name__ for family in families} == FAMILIES.keys()
