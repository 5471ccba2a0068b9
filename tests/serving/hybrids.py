"""Hybrids of the embedded model."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bosch.hybrid.conversion import deploy

TINY = Path(__file__).parents[2] / "bosch" / "assets" / "tiny-qwen3"
WINDOW = 64


def tiny_hybrid(ratio: float, window: int = WINDOW, seed: int = 0) -> Any:
    """Of the embedded model, with layers that differ."""
    dense = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    bits = [0] * round(64 * ratio)
    bits += [1] * (64 - len(bits))
    random.Random(seed).shuffle(bits)
    return deploy(dense, [bits[at : at + 8] for at in range(0, 64, 8)], window)


def tiny_folder(folder: Path) -> Path:
    """With the tokenizer that commands and servers need."""
    tiny_hybrid(0.5).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder
