"""What experiments share: a point of measurement, and the models and sides that they compare.

A row's `value` is always a speed or a share, so that higher is better everywhere. Its `dense` is
the same figure of the dense model, measured in turns with it; `computed` is what was computed for
an H100 before (docs/gpu.md).
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks import _measure
from benchmarks._measure import Row
from bosch.training.rehearsal import as_hybrid

K = 1024


@dataclass(frozen=True)
class Point:
    """What is measured together. It is known by its name: one that ended well is not measured
    again."""

    name: str
    measure: Callable[[], Iterable[Row]]


Points = Iterator[Point]


def prompt_lengths(device: torch.device) -> tuple[int, ...]:
    return (8 * K, 64 * K) if device.type == "cuda" else (128, 512)


@dataclass(frozen=True)
class Side:
    """A model that takes part: the dense one, or a hybrid."""

    name: str
    ratio: float = 0.75
    sink: str = "none"
    is_uneven: bool = False  # layers differ in their number of full groups, as in a searched mask


DENSE = Side("dense", ratio=0.0)
PLAIN = Side(".75")
STATIC = Side(".75 static", sink="static")  # what the chain makes by default
UNEVEN = Side(".75 static, uneven", sink="static", is_uneven=True)


class Models:
    """The dense model of transformers, and a hybrid of the same shape that becomes each side in
    turn. Random weights: the time does not depend on them."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device, self.window_tokens = device, K if on_gpu else 16
        self.chunk = 8 * K if on_gpu else 64
        name, dtype = ("Qwen3-1.7B", torch.bfloat16) if on_gpu else ("mini", torch.float32)
        self.config = _measure.read_shape(name)
        hybrid = as_hybrid(self.config, ratio=0.0, window_tokens=1)
        self.dense = _measure.make_model(self.config, device, dtype, "sdpa")
        self.hybrid = _measure.make_model(hybrid, device, dtype, "bosch")

    def of(self, side: Side) -> PreTrainedModel:
        if side is DENSE:
            return self.dense
        num_full = uneven_counts(self.config, side.ratio) if side.is_uneven else None
        _measure.set_hybrid(self.hybrid, side.ratio, self.window_tokens, side.sink, num_full)
        return self.hybrid

    def ids(self, num_tokens: int) -> torch.Tensor:
        return _measure.random_ids(self.config, num_tokens, self.device)


def uneven_counts(config: Any, ratio: float) -> list[int]:
    """Full groups of each layer, unlike from layer to layer: from none to twice the mean, and as
    many in all layers together as the ratio leaves."""
    layers, groups = config.num_hidden_layers, config.num_key_value_heads
    total = round((1 - ratio) * layers * groups)
    most = min(groups, math.ceil(2 * total / layers))
    # A staircase over the layers, then corrected one by one from the first layer on until the sum
    # is right.
    counts = [layer % (most + 1) for layer in range(layers)]
    layer = 0
    while (missing := total - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        if 0 <= counts[layer] + step <= most:
            counts[layer] += step
        layer = (layer + 1) % layers
    return counts


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def faster_from(rows: Sequence[Row]) -> list[str]:
    """What is faster than the dense model, and from which length on."""
    sentences = []
    compared = [row for row in rows if row.get("dense") and row.get("value")]
    for what in dict.fromkeys(row["what"] for row in compared):
        here = [row for row in compared if row["what"] == what]
        times = {row["tokens"]: row["value"] / row["dense"] for row in here}
        # Not the first length where it is faster: it must stay faster on all longer ones.
        longest_slower = max((tokens for tokens in times if times[tokens] < 1), default=0)
        faster = sorted(tokens for tokens in times if tokens > longest_slower)
        if not faster:
            verdict = "not faster than dense"
        elif longest_slower == 0:
            verdict = "faster than dense at every length"
        else:
            verdict = f"faster than dense from {_measure.short(faster[0])} tokens on"
        found = ", ".join(f"{times[n]:.2f} at {_measure.short(n)}" for n in sorted(times))
        sentences.append(f"{what}: {verdict} ({found} of dense's speed)")
    return sentences
