"""What a search keeps of each haystack between masks: the hidden states that enter its layers.

Masks that agree below a layer have the same states there. So a state is cached for a haystack and a
prefix of a mask, `z[:layer]`."""
# B batch (1), T tokens, N rows that predict answer tokens, C hidden size

from collections import OrderedDict
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from bosch.calibration import Haystack
from bosch.masks.mask import Z

CPU_MEMORY_GB = 1.0  # default for cached states


def cache_bytes(device: torch.device, memory_gb: float | None) -> int:
    """For the cached states of all haystacks."""
    if memory_gb is None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return int((CPU_MEMORY_GB if memory_gb is None else memory_gb) * (1 << 30))


class LoadedHaystack:
    """A haystack on the model's device, with its cached states. Each haystack has its own cache:
    they run in turn, and in a shared cache each would evict the next."""

    def __init__(self, haystack: Haystack, device: torch.device, capacity_bytes: int) -> None:
        # The last token of the last answer predicts nothing of interest.
        last = max(question.answer.stop for question in haystack.questions) - 1
        self.ids_T = haystack.ids_T[:last].to(device)
        rows = [row for question in haystack.questions for row in question.predicting]
        self.rows_N = torch.tensor(rows, device=device)
        self.targets_N = haystack.ids_T.to(device)[self.rows_N + 1]
        lengths = (len(question.answer) for question in haystack.questions)
        self.bounds = [*pairwise(accumulate(lengths, initial=0))]  # the rows of each question
        self.capacity_bytes = capacity_bytes
        self._states: OrderedDict[Z, Tensor] = OrderedDict()  # by prefix, the newest last
        self._bytes = 0

    def cached(self, prefix: Z) -> Tensor | None:
        if prefix in self._states:
            self._states.move_to_end(prefix)
        return self._states.get(prefix)

    def cache(self, prefix: Z, hidden_BTC: Tensor) -> None:
        """Cache the states if they fit; the least recently used are dropped first."""
        # First out, so that its room counts as free, and so that the state is the newest again.
        if (old_BTC := self._states.pop(prefix, None)) is not None:
            self._bytes -= old_BTC.nbytes
        if hidden_BTC.nbytes > self.capacity_bytes:
            return
        while self._bytes + hidden_BTC.nbytes > self.capacity_bytes:
            self._bytes -= self._states.popitem(last=False)[1].nbytes
        self._states[prefix] = hidden_BTC
        self._bytes += hidden_BTC.nbytes


class Branches:
    """Where masks leave the masks before them: the states worth caching."""

    def __init__(self) -> None:
        self._seen: set[Z] = set()  # the prefixes of all masks so far
        self._branches: dict[Z, int] = {}  # of all masks so far

    def branch(self, z: Z) -> int:
        """The lowest layer in which this mask differs from all earlier ones. A mask is asked for
        once for each haystack, in turn with others that are scored with it: each call returns the
        same."""
        if z not in self._branches:
            # Prefixes of a known prefix are known too, so their number is how far masks agree: at
            # most to the top layer, which is computed again even if the whole mask is known.
            prefixes = [z[:layer] for layer in range(1, len(z))]
            known = sum(prefix in self._seen for prefix in prefixes)
            self._seen.update(prefixes)
            self._branches[z] = known
        return self._branches[z]
