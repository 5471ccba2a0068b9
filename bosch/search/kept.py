"""What is kept of a text between evaluations, within a budget of memory: the hidden states that
enter a layer under the lower rows of a mask.

Masks that agree in their rows below a layer agree in everything below it, so what is kept belongs
to a prefix of a mask, `z[:layer]`.
"""
# B batch (1), T tokens, C hidden size

from collections import OrderedDict

import torch
from torch import Tensor

from bosch.search.objective import Rows


class Prefixes:
    """Numbers for the prefixes of all masks seen so far."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self._last: tuple[Rows, tuple[list[int], int]] | None = None

    def visit(self, z: Rows) -> tuple[list[int], int]:
        """The numbers of `z[:0]`, `z[:1]` ... `z[:L-1]`, and the lowest layer whose row tells this
        mask from all before it: the same for each of its texts, until another mask comes.
        """
        if self._last is None or self._last[0] != z:
            self._last = z, self._place(z)
        return self._last[1]

    def _place(self, z: Rows) -> tuple[list[int], int]:
        numbers, branch = [0], len(z) - 1
        for layer, row in enumerate(z[:-1]):
            key = numbers[-1], row
            if key not in self._numbers:
                branch = min(branch, layer)
                self._numbers[key] = len(self._numbers) + 1
            numbers.append(self._numbers[key])
        return numbers, branch


class Shelf:
    """What is kept of one text, the least recently used leaving first. Each text has a shelf of its
    own: they are run in turn, and on a common one each would push out the next.
    """

    def __init__(self, capacity_bytes: int, host_bytes: int = 0) -> None:
        """host_bytes: what leaves the device goes on in so much of the host's pinned memory."""
        self.capacity_bytes = capacity_bytes
        self._kept: OrderedDict[int, Tensor] = OrderedDict()
        self._bytes = 0
        self._host = Shelf(host_bytes) if host_bytes else None

    def get(self, prefix: int) -> Tensor | None:
        if prefix in self._kept:
            self._kept.move_to_end(prefix)
            return self._kept[prefix]
        waiting_BTC = self._host._remove(prefix) if self._host else None
        if waiting_BTC is None:
            return None
        hidden_BTC = waiting_BTC.to("cuda", non_blocking=True)
        self.put(prefix, hidden_BTC)
        return hidden_BTC

    def put(self, prefix: int, hidden_BTC: Tensor) -> None:
        """Keep it, if it fits."""
        self._remove(prefix)
        if hidden_BTC.nbytes > self.capacity_bytes:
            return
        while self._bytes + hidden_BTC.nbytes > self.capacity_bytes:
            oldest = next(iter(self._kept))
            old_BTC = self._kept[oldest]
            self._remove(oldest)
            if self._host is not None:
                waiting_BTC = torch.empty_like(old_BTC, device="cpu", pin_memory=True)
                self._host.put(oldest, waiting_BTC.copy_(old_BTC))
        self._kept[prefix] = hidden_BTC
        self._bytes += hidden_BTC.nbytes

    def _remove(self, prefix: int) -> Tensor | None:
        hidden_BTC = self._kept.pop(prefix, None)
        self._bytes -= 0 if hidden_BTC is None else hidden_BTC.nbytes
        return hidden_BTC
