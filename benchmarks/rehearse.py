"""Rehearse a training step without a GPU: the peak memory of one GPU, by what it is for.

    python -m benchmarks rehearse --model Qwen3-8B --gpus 8 16

bosch/training/rehearsal.py says how, and what is not included. Each takes about a minute of one
core. Micro-batches are tried in the order given, up to the first that does not fit.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks._models import SIZES, read_shape
from benchmarks._options import BenchmarkOptions, Row
from bosch.config import TrainConfig
from bosch.run.tables import show_rows
from bosch.training.rehearsal import COLUMNS, KERNELS, MARGIN_GB, Plan, as_hybrid, rehearse


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: tuple[str, ...] = SIZES  # known models (Qwen3-8B, ...) or folders with a config.json
    gpus: tuple[int, ...] = (1, 8, 16)  # numbers of GPUs
    kernels: tuple[str, ...] = KERNELS  # torch, liger
    micro_batch_sequences: tuple[int, ...] = (1,)  # sequences computed at once on a GPU
    batch_sequences: int = 64  # sequences in a step, over all GPUs
    seq_len: int = 32_768  # tokens in a sequence
    ratio: float = 0.75  # share of KV groups on the sliding window
    window: int = 1024  # window size in tokens
    memory_gb: float = 80.0  # memory of one GPU, in 10^9 bytes
    cpu_offload: bool = False  # keep weights and optimizer in host memory


def measure(options: Options) -> Iterator[Row]:
    rows: list[Row] = []
    for name, gpus, kernels in itertools.product(options.model, options.gpus, options.kernels):
        model = as_hybrid(read_shape(name)[0], options.ratio, options.window)
        for micro in options.micro_batch_sequences:
            settings = TrainConfig(
                batch_sequences=options.batch_sequences,
                micro_batch_sequences=micro,
                cpu_offload=options.cpu_offload,
            )
            plan = Plan(model, settings, options.seq_len, gpus, kernels)
            about = f"rehearsed: {name} on {gpus}, {micro} at once, {kernels}"
            row = rehearse(plan).row(plan, options.memory_gb)
            rows.append({"name": about, "model": name, **row})
            yield rows[-1]
            if rows[-1]["fits"] == "NO":
                break
    show_rows(
        f"rehearsed with fake tensors: {options.seq_len:,} tokens, ratio {options.ratio:g}; fits "
        f"{options.memory_gb:g} GB with {MARGIN_GB:g} for CUDA, NCCL and fragmentation",
        rows,
        {"model": "model", **COLUMNS},
    )
