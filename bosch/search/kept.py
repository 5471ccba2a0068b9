"""What is kept of a text between evaluations, within a budget of memory: the hidden states that
enter a layer under the lower rows of a mask, and the attention outputs of groups there.

Masks that agree in their rows below a layer agree in everything below it, so what is kept belongs
to a prefix of a mask, `z[:layer]`.
"""
# B batch (1), T tokens, C hidden size

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from bosch.search.layers import GroupOutputs
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


@dataclass
class Kept:
    """Of one text, at one prefix."""

    hidden_BTC: Tensor | None = None  # enter the layer
    outputs: GroupOutputs | None = None  # of that layer

    @property
    def bytes(self) -> int:
        hidden = 0 if self.hidden_BTC is None else self.hidden_BTC.nbytes
        return hidden + (0 if self.outputs is None else self.outputs.bytes)


class Shelf:
    """What is kept of one text, the least recently used leaving first. Each text has a shelf of its
    own: they are run in turn, and on a common one each would push out the next.
    """

    def __init__(self, capacity_bytes: int, host_bytes: int = 0) -> None:
        """host_bytes: hidden states that leave the device go on in this much of the host's pinned
        memory.
        """
        self.capacity_bytes = capacity_bytes
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._bytes = 0
        self._sizes: dict[int, int] = {}
        self._host = Shelf(host_bytes) if host_bytes else None

    def get(self, prefix: int) -> Kept | None:
        kept = self._kept.get(prefix)
        if kept is not None:
            self._kept.move_to_end(prefix)
            return kept
        waiting = self._host._remove(prefix) if self._host else None
        if waiting is None or waiting.hidden_BTC is None:
            return None
        kept = Kept(waiting.hidden_BTC.to("cuda", non_blocking=True))
        self.put(prefix, kept)
        return kept

    def put(self, prefix: int, kept: Kept) -> None:
        """Keep it, if it fits; one that has grown is put again."""
        self._remove(prefix)
        if kept.bytes > self.capacity_bytes:
            kept = Kept(kept.hidden_BTC)  # the hidden states alone may fit
        if kept.bytes > self.capacity_bytes or not kept.bytes:
            return
        while self._bytes + kept.bytes > self.capacity_bytes:
            oldest = next(iter(self._kept))
            self._let_go(oldest, self._remove(oldest))
        self._kept[prefix], self._sizes[prefix] = kept, kept.bytes
        self._bytes += kept.bytes

    def _remove(self, prefix: int) -> Kept | None:
        kept = self._kept.pop(prefix, None)
        self._bytes -= self._sizes.pop(prefix, 0)
        return kept

    def _let_go(self, prefix: int, kept: Kept | None) -> None:
        hidden_BTC = kept.hidden_BTC if kept else None
        if self._host is None or hidden_BTC is None:
            return
        waiting_BTC = torch.empty_like(hidden_BTC, device="cpu", pin_memory=True)
        waiting_BTC.copy_(hidden_BTC)
        self._host.put(prefix, Kept(waiting_BTC))
