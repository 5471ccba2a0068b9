"""A cache of hidden states between evaluations, within a memory budget: the states that enter a
layer, for one text and one mask of the layers below.

Masks that agree below a layer have the same states there, so a cached state belongs to a prefix of
a mask, `z[:layer]`.
"""
# B batch (1), T tokens, C hidden size

from collections import OrderedDict

import torch
from torch import Tensor

from bosch.search.objective import Z


class PrefixNumbers:
    """Numbers the prefixes of all masks seen so far."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self._last: tuple[Z, tuple[list[int], int]] | None = None

    def visit(self, z: Z) -> tuple[list[int], int]:
        """The numbers of `z[:0]`, `z[:1]` ... `z[:L-1]`, and the lowest layer in which this mask
        differs from all earlier ones. Calls with the same mask in a row return the same.
        """
        if self._last is None or self._last[0] != z:
            self._last = z, self._place(z)
        return self._last[1]

    def _place(self, z: Z) -> tuple[list[int], int]:
        numbers, branch = [0], len(z) - 1
        for layer, row in enumerate(z[:-1]):
            key = numbers[-1], row
            if key not in self._numbers:
                branch = min(branch, layer)
                self._numbers[key] = len(self._numbers) + 1
            numbers.append(self._numbers[key])
        return numbers, branch


class StateCache:
    """The cached states of one text; the least recently used are dropped first. Each text has its
    own cache: texts run in turn, and in a shared cache each would evict the next.
    """

    def __init__(self, capacity_bytes: int, host_bytes: int = 0) -> None:
        """host_bytes: size of a second cache, in pinned host memory, for evicted states."""
        self.capacity_bytes = capacity_bytes
        self._states: OrderedDict[int, Tensor] = OrderedDict()
        self._bytes = 0
        self._host = StateCache(host_bytes) if host_bytes else None

    def get(self, prefix: int) -> Tensor | None:
        if prefix in self._states:
            self._states.move_to_end(prefix)
            return self._states[prefix]
        waiting_BTC = self._host._remove(prefix) if self._host else None
        if waiting_BTC is None:
            return None
        hidden_BTC = waiting_BTC.to("cuda", non_blocking=True)
        self.put(prefix, hidden_BTC)
        return hidden_BTC

    def put(self, prefix: int, hidden_BTC: Tensor) -> None:
        """Cache the states if they fit."""
        self._remove(prefix)
        if hidden_BTC.nbytes > self.capacity_bytes:
            return
        while self._bytes + hidden_BTC.nbytes > self.capacity_bytes:
            oldest = next(iter(self._states))
            old_BTC = self._states[oldest]
            self._remove(oldest)
            if self._host is not None:
                waiting_BTC = torch.empty_like(old_BTC, device="cpu", pin_memory=True)
                self._host.put(oldest, waiting_BTC.copy_(old_BTC))
        self._states[prefix] = hidden_BTC
        self._bytes += hidden_BTC.nbytes

    def _remove(self, prefix: int) -> Tensor | None:
        hidden_BTC = self._states.pop(prefix, None)
        self._bytes -= 0 if hidden_BTC is None else hidden_BTC.nbytes
        return hidden_BTC
