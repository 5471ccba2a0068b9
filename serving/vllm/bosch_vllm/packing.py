"""How the KV heads of a hybrid are cut into attention modules. Needs no vLLM.

vLLM gives a group of modules a block of memory for some tokens; all its blocks have one size in
bytes. With modules of equal head count ("units") its own grouping wastes only what a group that is
not full leaves empty.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Packing:
    """KV heads in each module: `full[layer]` first, then `window[layer]`, in the heads' order."""

    full: list[list[int]]
    window: list[list[int]]

    @property
    def num_modules(self) -> int:
        return sum(map(len, self.full + self.window))


def pack_units(num_full: Sequence[int], num_groups: int) -> Packing:
    """Modules of equal head count: the greatest that divides every count of every layer."""
    num_window = [num_groups - count for count in num_full]
    unit = math.gcd(*num_full, *num_window)
    full, window = ([[unit] * (n // unit) for n in counts] for counts in (num_full, num_window))
    return Packing(full, window)


def share_of_dense(num_full: Sequence[int], num_groups: int, window: int, tokens: int) -> float:
    """KV entries of one text, as a share of those with full attention everywhere: the formula."""
    total = len(num_full) * num_groups
    windowed = total - sum(num_full)
    return (sum(num_full) * tokens + windowed * min(window - 1, tokens)) / (total * tokens)
