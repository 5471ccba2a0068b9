"""How long attention takes, by rates that `python -m benchmarks gpu` has measured
(bosch/attention/rates.py). Windows were measured with one number of tokens, 1,024; for others the
FLOPs are theirs and the speed is the same."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from bosch.attention.rates import name_of, nearest, rates_like
from bosch.hybrid.conversion import head_size
from bosch.training.metrics import heads_by_window, visible_pairs
from bosch.training.parallel import choose_device

BOTH = (False, True)


@dataclass(frozen=True)
class AttentionSpeed:
    """Of a device on which everything that is asked was measured, by its fastest backend."""

    device: str  # its name in rates.json

    @classmethod
    def of(cls, device: str) -> "AttentionSpeed | None":
        """None: not measured there, or only in part."""
        kinds = [(windowed, gradients) for windowed in BOTH for gradients in BOTH]
        return cls(device) if all(rates_like(device, *kind) for kind in kinds) else None

    @classmethod
    def here(cls, dtype: torch.dtype | None = None) -> "AttentionSpeed | None":
        """Of this rank's device; None for a type that is not measured on such devices."""
        device = choose_device(os.environ)
        measured = torch.bfloat16 if device.type == "cuda" else torch.float32
        return cls.of(name_of(device)) if dtype in (None, measured) else None

    def flops_per_second(self, tokens: int, windowed: bool, gradients: bool, sink: bool) -> float:
        # Full attention sees no sink, and perhaps none was measured.
        rows = rates_like(self.device, windowed, gradients, sink=sink and windowed)
        rows = rows or rates_like(self.device, windowed, gradients)
        return max(float(row["flops_per_second"]) for row in nearest(rows, tokens))

    def seconds(
        self, model: PretrainedConfig, lengths: Sequence[int], gradients: bool, sink: bool = False
    ) -> float:
        """For documents of these lengths, in all layers, forward (`gradients`: and backward)."""
        found, passes = 0.0, 3 if gradients else 1
        for heads, window in heads_by_window(model):
            for length, count in Counter(lengths).items():
                flops = 4 * passes * head_size(model) * heads * visible_pairs(length, window)
                windowed = window is not None and window < length
                found += count * flops / self.flops_per_second(length, windowed, gradients, sink)
        return found


def describe_rule(known: AttentionSpeed | None) -> str:
    """For the line that says a time."""
    if known is None:
        return "attention counts as products of matrices"
    return f"attention by the rates measured on {known.device}"
