"""Rehearse a training step without a GPU: the peak memory of one GPU, by what it is for, and the
hours of a training, by formula.

    python -m benchmarks rehearse --model Qwen3-8B --gpus 8 16

bosch/training/rehearsal.py says how, and what is not included. Each takes about a minute of one
core. Micro-batches are tried in the order given, up to the first that does not fit. The hours are
FLOPs (training/metrics.py) divided by the GPUs' peak times --mfu.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks._measure import BenchmarkOptions, Row, read_shape
from bosch.config import TrainConfig
from bosch.plugins import suggest
from bosch.run.errors import UserError
from bosch.training import rehearsal
from bosch.training.metrics import PEAK_FLOPS, count_active_weights, training_flops
from bosch.training.model_start import build_on_meta
from bosch.training.rehearsal import KERNELS, MARGIN_GB, Plan, as_hybrid, rehearse

SIZES = ("Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-30B-A3B")
COLUMNS = {"model": "model", **rehearsal.COLUMNS, "hours": "hours:.1f"}


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
    tokens: float = 2.5e9  # tokens to train on in total
    gpu: str = "H100"  # type of the GPUs, for the hours: A800, H100, H200 and others
    mfu: float = 0.4  # share of the GPUs' peak that training reaches

    def __post_init__(self) -> None:
        if self.gpu not in PEAK_FLOPS:
            raise UserError(
                f"--gpu {self.gpu}: its peak is not known; {suggest(self.gpu, list(PEAK_FLOPS))}"
            )
        if not 0 < self.mfu <= 1:
            raise UserError(f"--mfu {self.mfu}: it is a share, above 0 and at most 1.")

    @property
    def title(self) -> str:
        return (
            f"rehearsed with fake tensors: {self.seq_len:,} tokens, ratio {self.ratio:g}; fits "
            f"{self.memory_gb:g} GB with {MARGIN_GB:g} to spare; hours for "
            f"{self.tokens / 1e9:g}B tokens computed at {self.mfu:.0%} of the peak of {self.gpu}s"
        )


def measure(options: Options) -> Iterator[Row]:
    for name, gpus, kernels in itertools.product(options.model, options.gpus, options.kernels):
        model = as_hybrid(read_shape(name), options.ratio, options.window)
        num_weights = count_active_weights(build_on_meta(model))
        per_token = training_flops(model, num_weights, [options.seq_len]) / options.seq_len
        hours = options.tokens * per_token / (gpus * PEAK_FLOPS[options.gpu] * options.mfu) / 3600
        for micro in options.micro_batch_sequences:
            sizes: Any = {"batch_sequences": options.batch_sequences}
            sizes |= {"micro_batch_sequences": micro, "cpu_offload": options.cpu_offload}
            plan = Plan(model, TrainConfig(**sizes), options.seq_len, gpus, kernels)
            about = f"rehearsed: {name} on {gpus}, {micro} at once, {kernels}"
            row = rehearse(plan).row(plan, options.memory_gb)
            yield {"name": about, "model": name, **row, "hours": hours}
            if row["fits"] == "NO":
                break
