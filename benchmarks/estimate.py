"""Estimate the memory and time of continual pretraining. Computed by formula; nothing is run.

    python -m benchmarks estimate --model Qwen3-8B --gpus 16

Bytes per GPU, for N weights on G GPUs and micro-batches of T tokens:

    16 N / G                              fp32 parameters, gradients and both moments of AdamW; in
                                          host memory with --cpu-offload
    2 H T per layer                       the layer's input (activation checkpointing is on)
    (20 H + 14 I + 20 (Q + 2 K)) T        the one block that is being computed
    8 N of a block                        this block and the next, gathered in bf16, and a gradient
    6 V H                                 the head, gathered in bf16, and its gradient

H hidden size, I intermediate size (of the active experts), Q and K the total size of the query and
the KV heads, V vocabulary size. The third line is fitted to the peaks of simulations with fake
tensors (10 cases, 15 to 158 GB; the total is within 8 % of them); Liger's kernels need less. CUDA
itself, NCCL and fragmentation take another 3 to 8 GB; "fits" allows 6 for them.

Time is FLOPs (training/flops.py) divided by the GPUs' peak times --mfu.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks._models import read_shape, spread_mask
from benchmarks._options import BenchmarkOptions, Row
from bosch.hybrid.models import head_size, hybrid_config
from bosch.plugins import suggest
from bosch.run.errors import UserError
from bosch.run.tables import show_rows
from bosch.training.flops import PEAK_FLOPS, count_active_weights, training_flops

SIZES = ("Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-30B-A3B")
MARGIN_GB = 6.0  # for CUDA, NCCL and fragmentation


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: tuple[str, ...] = SIZES  # known models (Qwen3-8B, ...) or model folders
    gpus: int = 8  # number of GPUs
    gpu: str = "A800"  # type of the GPUs: A800, H100, H200 and others
    memory_gb: float = 80.0  # memory of one GPU, in 10^9 bytes
    mfu: float = 0.4  # share of the GPUs' peak that training reaches
    ratio: float = 0.75  # share of KV groups on the sliding window
    window: int = 1024  # window size in tokens
    seq_len: int = 32_768  # tokens in a sequence
    batch_sequences: int = 64  # sequences in a step, over all GPUs
    micro_batch_sequences: int = 1  # sequences computed at once on a GPU
    # Keep parameters and optimizer in host memory. The time does not include the transfers.
    cpu_offload: bool = False
    tokens: float = 2.5e9  # tokens to train on in total

    def __post_init__(self) -> None:
        if self.gpu not in PEAK_FLOPS:
            raise UserError(
                f"--gpu {self.gpu}: its peak is not known; {suggest(self.gpu, list(PEAK_FLOPS))}"
            )
        at_once = self.micro_batch_sequences * self.gpus
        if min(at_once, self.batch_sequences) < 1 or self.batch_sequences % at_once:
            raise UserError(
                f"--batch-sequences {self.batch_sequences} is not a multiple of {self.gpus} GPUs x "
                f"{self.micro_batch_sequences} sequences. Change --gpus or --micro-batch-sequences."
            )
        if min(self.mfu, self.seq_len, self.tokens) <= 0:
            raise UserError("--mfu, --seq-len and --tokens must be above 0.")


def measure(options: Options) -> list[Row]:
    rows = [estimate_training(model, options) for model in options.model]
    show_rows(
        f"computed, not measured: {options.gpus} x {options.gpu} at {options.mfu:.0%} of their "
        f"peak, {options.micro_batch_sequences} x {options.seq_len:,} tokens at once on each, "
        f"ratio {options.ratio:g}",
        rows,
        {
            "model": "model",
            "peak memory, GB": "value:.0f",
            f"fits {options.memory_gb:g} GB": "fits",
            "step, s": "step_seconds:.1f",
            "dense step, s": "dense_step_seconds:.1f",
            f"{options.tokens / 1e9:g}B tokens, h": "hours:.1f",
            "checkpoint, GB": "checkpoint_gb:.0f",
            "export, GB": "export_gb:.0f",
        },
    )
    return rows


def estimate_training(model: str, options: Options) -> Row:
    config, _ = read_shape(model)
    weights = count_weights(config)
    mask = spread_mask(options.ratio, config.num_hidden_layers, config.num_key_value_heads)
    hybrid = hybrid_config(config, mask, options.window)
    rate = options.gpus * PEAK_FLOPS[options.gpu] * options.mfu
    step, dense_step = (
        training_flops(shape, weights.active, [options.seq_len] * options.batch_sequences) / rate
        for shape in (hybrid, config)
    )
    steps = options.tokens / (options.batch_sequences * options.seq_len)
    peak = peak_bytes(config, weights, options) / 1e9
    return {
        "name": f"computed: {model} peak memory per GPU",
        "model": model,
        "value": peak,
        "unit": "GB",
        "fits": "yes" if peak + MARGIN_GB <= options.memory_gb else "NO",
        "step_seconds": step,
        "dense_step_seconds": dense_step,
        "hours": step * steps / 3600,
        "checkpoint_gb": 12 * weights.all / 1e9,  # fp32 and both moments
        "export_gb": 2 * weights.all / 1e9,
    }


def peak_bytes(config: PretrainedConfig, weights: "Weights", options: Options) -> float:
    """On one GPU, by the formula at the top of this file."""
    tokens = options.micro_batch_sequences * options.seq_len
    hidden, head = config.hidden_size, head_size(config)
    intermediate = getattr(config, "num_experts_per_tok", 1) * getattr(
        config, "moe_intermediate_size", config.intermediate_size
    )
    heads = head * (config.num_attention_heads + 2 * config.num_key_value_heads)
    return (
        (0 if options.cpu_offload else 16 * weights.all / options.gpus)
        + 2 * hidden * tokens * config.num_hidden_layers
        + (20 * hidden + 14 * intermediate + 20 * heads) * tokens
        + 8 * weights.block
        + 6 * config.vocab_size * hidden
    )


@dataclass(frozen=True)
class Weights:
    """Numbers of weights."""

    all: int
    active: int  # used for each token
    block: int  # in one layer


def count_weights(config: PretrainedConfig) -> Weights:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return Weights(
        sum(parameter.numel() for parameter in model.parameters()),
        count_active_weights(model),
        sum(parameter.numel() for parameter in model.model.layers[0].parameters()),
    )
