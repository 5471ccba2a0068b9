"""What a block of an 8B model costs in training: a model of two layers less, and of four."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks import train
from benchmarks._measure import Row, short
from benchmarks.experiments._points import K, Point, Points, free_memory
from bosch.model import LOCAL
from bosch.training.metrics import count_active_weights, peak_flops, training_flops
from bosch.training.model_start import build_on_meta

MINUTES = 3.0
COMPUTED_MFU = 0.41  # of 8B at 32k, from rates that were measured
FEW, MORE = 2, 4  # layers; the difference holds neither embeddings nor the loss
BLOCKS_8B = 36


@dataclass(frozen=True)
class Case:
    name: str
    ratio: float = 0.75
    sink: str = "static"
    documents: int = 1
    precision: Any = "bf16"
    is_compiled: bool = True


# What decides most comes first: a machine may not be lent for longer.
CASES = (
    Case("compiled"),
    Case("compiled, dense", ratio=0.0),
    Case("compiled, no sinks", sink="none"),
    Case("compiled, 16 documents", documents=16),
    Case("fp8 tensorwise", precision="fp8"),
    Case("fp8 rowwise", precision="fp8-rowwise"),
    Case("not compiled", is_compiled=False),
)


# On a CPU, which compiles for minutes.
FEW_CASES = (Case("not compiled", is_compiled=False), Case("dense", ratio=0.0, is_compiled=False))


def points(device: torch.device) -> Points:
    for case in CASES if device.type == "cuda" else FEW_CASES:
        yield Point(f"a block, {case.name}", partial(measure_block, case, device))


def measure_block(case: Case, device: torch.device) -> list[Row]:
    on_gpu = device.type == "cuda"
    options = train.Options(
        model="Qwen3-8B" if on_gpu else "mini",
        length=32 * K if on_gpu else 128,
        window=K if on_gpu else 16,
        ratios=(case.ratio,) if case.ratio else (),
        sinks=(case.sink,),
        documents=case.documents,
        batch=1,
        steps=3,
        precision=case.precision if on_gpu else "fp32",
        device=device.type,
    )
    seconds, flops, peak = {}, {}, {}
    for layers in (FEW, MORE):
        with tempfile.TemporaryDirectory() as folder:
            # A small vocabulary: that of 8B would take most of the time to make and to read.
            sizes = {"num_hidden_layers": layers, "vocab_size": 4096, "tie_word_embeddings": True}
            models = train.save_models(options, Path(folder), device, sizes)
            *_, model = models.values()
            steps = train.train_with_ours(options, model, compile=case.is_compiled)
            config = AutoConfig.from_pretrained(model, **LOCAL)
            weights = count_active_weights(build_on_meta(config))
        free_memory()
        seconds[layers] = median(step["compute_seconds"] for step in steps[1:])
        lengths = [options.length // case.documents] * case.documents
        flops[layers] = training_flops(config, weights, lengths)
        peak[layers] = steps[-1].get("memory_gb")
    # The difference of two models has neither embeddings, loss nor optimizer's start in it: only
    # blocks.
    block = (seconds[MORE] - seconds[FEW]) / (MORE - FEW)
    block_flops = (flops[MORE] - flops[FEW]) / (MORE - FEW)
    row: Row = {
        "name": f"a block, {case.name}",
        "what": f"a block, {case.name}",
        "tokens": options.length,
        # On a busy CPU the smaller model can take longer; then nothing is known.
        "value": block_flops / block / 1e12 if block > 0 else None,
        "unit": "TFLOP/s",
        "block_ms": 1e3 * block,
        "seconds": seconds,
        "memory_gb": peak[MORE],
    }
    if (most := peak_flops(device)) is not None:
        row |= {"mfu": block_flops / block / most, "computed": COMPUTED_MFU * most / 1e12}
        row["tokens_per_second_8b"] = options.length / (BLOCKS_8B * block)
    return [row]


def conclude(rows: Sequence[Row]) -> list[str]:
    dense = next((row for row in rows if row["name"].endswith("dense")), None)
    sentences = []
    for row in rows:
        line = f"{row['name']} of {short(row['tokens'])} tokens: {row['block_ms']:.1f} ms"
        if dense is not None and row is not dense and row["block_ms"] > 0:
            line += f", {dense['block_ms'] / row['block_ms']:.2f} times as fast as dense"
        if "tokens_per_second_8b" in row:
            speed = f"{row['tokens_per_second_8b']:,.0f} tokens/s"
            line += f"; {BLOCKS_8B} of them, {speed} ({row['mfu']:.0%} of the peak)"
        sentences.append(line)
    return sentences
