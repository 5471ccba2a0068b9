"""Memory and time of continual pretraining before any of it is spent: computed, not measured.

    python -m benchmarks plan --model Qwen3-8B --gpus 16

Per GPU, in bytes, for N weights shared by G GPUs and micro-batches of T tokens:

    16 N / G                              fp32 parameters, gradients and both moments of AdamW; with
                                          --cpu-offload they are in host memory
    2 H T                                 a layer, its input (activation checkpointing is on)
    (20 H + 14 I + 20 (Q + 2 K)) T        the one block that is computed at the moment
    8 N of a block                        gathered in bf16, the next one too, and its gradient
    6 V H                                 the head, gathered in bf16, and its gradient

H hidden size, I intermediate size (of the active experts), Q and K all query and KV heads, V the
vocabulary. The third line is fitted to peaks of a simulation with fake tensors (10 cases, 15 to
158 GB; the whole is within 8 % of them); Liger's kernels stay below it. CUDA itself, NCCL and
fragmentation come on top: MARGIN_GB.

Time is FLOPs (training/flops.py) over what the GPUs do at the share of their peak that --mfu says.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks._models import read_shape, spread_mask
from benchmarks._options import BenchmarkOptions
from bosch.hybrid.models import head_size, hybrid_config
from bosch.plugins import suggest
from bosch.run.errors import UserError
from bosch.run.tables import show_rows
from bosch.training.flops import PEAK_FLOPS, count_active_weights, training_flops

SIZES = ("Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-30B-A3B")
MARGIN_GB = 6.0  # of the 3 to 8 that CUDA, NCCL and fragmentation take


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: tuple[str, ...] = SIZES
    """Known shapes, or folders."""
    gpus: int = 8
    gpu: str = "A800"
    """A name that has a known peak: A800, H100, H200, ..."""
    memory_gb: float = 80.0
    """Of one GPU, in 10^9 bytes."""
    mfu: float = 0.4
    """The share of the GPUs' peak that is reached."""
    ratio: float = 0.75
    window: int = 1024
    seq_len: int = 32_768
    batch_sequences: int = 64
    micro_batch_sequences: int = 1
    cpu_offload: bool = False
    """Parameters and optimizer in host memory; the time does not count what that costs."""
    tokens: float = 2.5e9
    """Of the whole training."""

    def __post_init__(self) -> None:
        if self.gpu not in PEAK_FLOPS:
            raise UserError(
                f"--gpu {self.gpu}: its peak is not known; {suggest(self.gpu, list(PEAK_FLOPS))}"
            )
        at_once = self.micro_batch_sequences * self.gpus
        if min(at_once, self.batch_sequences) < 1 or self.batch_sequences % at_once:
            raise UserError(
                f"{self.gpus} GPUs with {self.micro_batch_sequences} sequences each do not divide "
                f"a batch of {self.batch_sequences}."
            )


def measure(options: Options) -> list[dict[str, Any]]:
    rows = [plan_model(model, options) for model in options.model]
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
            "dense model's": "dense_step_seconds:.1f",
            f"{options.tokens / 1e9:g}B tokens, h": "hours:.1f",
            "checkpoint, GB": "checkpoint_gb:.0f",
            "export, GB": "export_gb:.0f",
        },
    )
    return rows


def plan_model(model: str, options: Options) -> dict[str, Any]:
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
    """Of one GPU; the formula stands at the top of this file."""
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
    active: int  # that multiply for a token
    block: int  # of one layer


def count_weights(config: PretrainedConfig) -> Weights:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    return Weights(
        sum(parameter.numel() for parameter in model.parameters()),
        count_active_weights(model),
        sum(parameter.numel() for parameter in model.model.layers[0].parameters()),
    )
