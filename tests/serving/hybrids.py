"""Hybrids of the embedded model."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bosch.hybrid.conversion import deploy
from bosch.sink import NO_SINK, Sink, SinkConstants

TINY = Path(__file__).parents[2] / "bosch" / "assets" / "tiny-qwen3"
WINDOW = 64


def tiny_hybrid(ratio: float, window: int = WINDOW, seed: int = 0, has_sinks: bool = False) -> Any:
    """Of the embedded model, with layers that differ; with static sinks that no query ignores."""
    dense = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    bits = [0] * round(64 * ratio)
    bits += [1] * (64 - len(bits))
    random.Random(seed).shuffle(bits)
    draw = torch.Generator().manual_seed(seed)
    constants = SinkConstants(*(torch.randn(8, 8, 16, generator=draw) for _ in range(2)))
    static = Sink("static", constants=constants)
    rows = [bits[at : at + 8] for at in range(0, 64, 8)]
    return deploy(dense, rows, window, static if has_sinks else NO_SINK)


def tiny_folder(folder: Path) -> Path:
    """With the tokenizer that commands and servers need."""
    tiny_hybrid(0.5).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder
