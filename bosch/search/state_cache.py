"""A cache of hidden states between evaluations, within a memory budget: the states that enter a
layer, for one text and one mask of the layers below.

Masks that agree below a layer have the same states there, so a cached state belongs to a prefix of
a mask, `z[:layer]`.
"""
# B batch (1), T tokens, C hidden size

from collections import OrderedDict

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

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._states: OrderedDict[int, Tensor] = OrderedDict()
        self._bytes = 0

    def get(self, prefix: int) -> Tensor | None:
        if prefix in self._states:
            self._states.move_to_end(prefix)
        return self._states.get(prefix)

    def put(self, prefix: int, hidden_BTC: Tensor) -> None:
        """Cache the states if they fit."""
        if (old_BTC := self._states.pop(prefix, None)) is not None:
            self._bytes -= old_BTC.nbytes
        if hidden_BTC.nbytes > self.capacity_bytes:
            return
        while self._bytes + hidden_BTC.nbytes > self.capacity_bytes:
            self._bytes -= self._states.popitem(last=False)[1].nbytes
        self._states[prefix] = hidden_BTC
        self._bytes += hidden_BTC.nbytes
