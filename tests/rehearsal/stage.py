"""Runs one recipe as its command line does, and prints what its tensors took: `python
tests/rehearsal/stage.py VOCABULARY HIDDEN_SIZE RECIPE ARGUMENTS...`.

The loss takes chunks of 64 rows, so that short sequences show them. The last line is JSON: `rows`,
the most rows of logits that existed at once in one tensor, and `peak_gb`, the most memory that the
process held of its own, without mapped files.
"""

import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[2]))

from bosch.training import loss


class LargestLogits(TorchDispatchMode):
    """The most rows of a tensor whose last dimension is the vocabulary, in forward and backward;
    but for the head's weight and its gradient, which have as many rows as the hidden size."""

    def __init__(self, vocabulary: int, hidden_size: int) -> None:
        super().__init__()
        self.vocabulary, self.hidden_size, self.rows = vocabulary, hidden_size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.shape[-1:] == (self.vocabulary,):
                rows = leaf.numel() // self.vocabulary
                self.rows = max(self.rows, rows if rows != self.hidden_size else 0)
        return result


class OwnMemory(threading.Thread):
    """Peak of the memory that is no mapped file."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.pages = 0

    def run(self) -> None:
        while True:
            _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
            self.pages = max(self.pages, resident - shared)
            time.sleep(0.02)


def main() -> None:
    vocabulary, hidden_size, recipe, *arguments = sys.argv[1:]
    memory, logits = OwnMemory(), LargestLogits(int(vocabulary), int(hidden_size))
    memory.start()
    began = time.monotonic()
    loss.CHUNK_ROWS = 64
    with logits:
        importlib.import_module(f"bosch.recipes.{recipe}").main(arguments)
    peak = memory.pages * os.sysconf("SC_PAGE_SIZE") / 1e9
    figures = {"rows": logits.rows, "peak_gb": peak, "seconds": time.monotonic() - began}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
