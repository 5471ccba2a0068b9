"""How the KV heads of a hybrid are cut into attention modules. Needs no vLLM.

vLLM gives a group of modules a block of memory for some tokens; all its blocks have one size in
bytes. With modules of equal head count ("units") its own grouping wastes only what a group that is
not full leaves empty. "packed" cuts the heads of a kind where a block is full, so that a layer has
about two modules, and names the block that holds each (grouping.py).

A packing has for each layer the heads of each module by its name, in the order of the heads.
"""

import math
from collections.abc import Sequence

Packing = list[dict[str, int]]


def pack_units(num_full: Sequence[int], num_groups: int) -> Packing:
    """Modules of equal head count: the greatest that divides every count of every layer."""
    unit = math.gcd(*num_full, num_groups)
    return [
        {f"full{i}": unit for i in range(full // unit)}
        | {f"window{i}": unit for i in range((num_groups - full) // unit)}
        for full in num_full
    ]


def pack_blocks(num_full: Sequence[int], num_groups: int, kept: int, tokens: int) -> Packing:
    """Modules that cross no block. `kept`: entries that a text of `tokens` keeps for a window."""
    num_window = [num_groups - count for count in num_full]
    capacity = heads_in_a_block(sum(num_full), sum(num_window), kept, tokens)
    packing: Packing = [{} for _ in num_full]
    for kind, counts in (("full", num_full), ("window", num_window)):
        filled = 0
        for pieces, count in zip(packing, counts, strict=True):
            end = filled + count
            while filled < end:
                block, used = divmod(filled, capacity)
                pieces[f"{kind}_block{block}"] = min(end - filled, capacity - used)
                filled += pieces[f"{kind}_block{block}"]
    return packing


def heads_in_a_block(num_full: int, num_window: int, kept: int, tokens: int) -> int:
    """The number that makes the fewest blocks, each of which has its own table, where a text takes
    the least memory or at most 5 % more."""
    if not num_full:
        return num_window

    def plan(heads: int) -> tuple[int, int]:
        full, window = math.ceil(num_full / heads), math.ceil(num_window / heads)
        return full + window, (full * tokens + window * min(kept, tokens)) * heads

    plans = {heads: plan(heads) for heads in range(1, num_full + 1)}
    good = [heads for heads, (_, held) in plans.items() if held <= 1.05 * plans[1][1]]
    return min(good, key=plans.__getitem__)


def share_of_dense(num_full: Sequence[int], num_groups: int, window: int, tokens: int) -> float:
    """KV entries of one text, as a share of those with full attention everywhere: the formula."""
    total = len(num_full) * num_groups
    windowed = total - sum(num_full)
    return (sum(num_full) * tokens + windowed * min(window - 1, tokens)) / (total * tokens)
