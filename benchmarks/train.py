"""Tokens a second of our training loop beside Hugging Face's Trainer: same model, rows, precision
and batch, in turns.

Sides: the Trainer on the dense model, our loop on the dense model, and our loop on a hybrid with
the same weights. What counts is the time from one optimizer step to the next, whoever makes it;
starting, loading and exporting do not. Each side's peak memory is that of a process of its own.
"""

import gc
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks._memory import PeakMemory
from benchmarks._models import make_dense, read_shape, spread_mask
from benchmarks._options import BenchmarkOptions
from benchmarks._timing import (
    choose_device,
    describe_device,
    now,
    short,
    show_table,
    speedup,
)
from benchmarks.plan import count_weights
from bosch.config import TrainConfig
from bosch.hybrid.models import deploy
from bosch.masks.mask import describe_bytes
from data.loader import Sequences, TokenFolder
from recipes.presets import TINY_MODEL, find_model
from training.flops import peak_flops, training_flops

SHOWS_TABLE = True
TRAINER, DENSE = "Trainer, dense", "ours, dense"
# Of the Trainer's speed. Met where the tiny model trains on a CPU with the default options.
AT_LEAST = {"ours, dense": 1.0, "ours, ratio 0.75": 1.15}


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: str = TINY_MODEL
    """A folder, an embedded model, or a known shape (mini, Qwen3-1.7B), which gets random
    weights."""
    length: int = 2048
    window: int = 64
    ratios: tuple[float, ...] = (0.75,)
    batch: int = 2
    """Sequences of a step, all at once."""
    steps: int = 3
    """Timed in a round, behind one that is not."""
    rounds: int = 3
    precision: Literal["fp32", "bf16"] = "fp32"
    threads: int = 1
    device: str | None = None
    """None: the GPU if there is one."""


def gpu_options() -> tuple[Options, ...]:
    """One sequence of the paper's recovery data, with Liger and the fastest backend."""
    return (
        Options(
            model="Qwen3-1.7B", length=32_768, window=1024, batch=1, precision="bf16", rounds=3
        ),
    )


def measure(options: Options) -> list[dict[str, Any]]:
    device = choose_device(options.device)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        sides = make_sides(options, Path(folder), device)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, (_, side) in sides.items():
                seconds[name].append(seconds_of_a_step(side, device))
        peaks = {name: peak_memory(options, side, device) for name, (_, side) in sides.items()}
        flops = {name: flops_of_a_step(options, model) for name, (model, _) in sides.items()}
    tokens = options.batch * options.length
    peak = peak_flops(device)
    rows: list[dict[str, Any]] = []
    for name in sides:
        a_second = flops[name] / median(seconds[name])
        row = {
            "name": f"{options.model}, {short(options.length)} tokens, {name}, beside the Trainer",
            "value": speedup(seconds[TRAINER], seconds[name]),
            "unit": "times",
            "side": name,
            "tokens_per_second": tokens / median(seconds[name]),
            "tflops_per_second": a_second / 1e12,
            "mfu": a_second / peak if peak and options.precision == "bf16" else None,
            "peak_bytes": peaks[name],
        }
        if device.type == "cpu" and name in AT_LEAST:
            row["at_least"] = AT_LEAST[name]
        rows.append(row)
    show_table(
        f"{options.model}, batch {options.batch} x {short(options.length)} tokens, window "
        f"{options.window}, {options.precision}, {describe_device(device)}",
        ("side", "tokens/s", "beside the Trainer", "MFU", "peak memory"),
        [
            (
                row["side"],
                f"{row['tokens_per_second']:,.0f}",
                f"{row['value']:.2f}x",
                f"{row['mfu']:.1%}" if row["mfu"] else None,
                describe_bytes(row["peak_bytes"]) if row["peak_bytes"] else None,
            )
            for row in rows
        ],
    )
    return rows


# -------------------------------------------------------------------------------------------- sides

Side = Callable[[], None]  # trains for options.steps + 1 steps


def make_sides(
    options: Options, folder: Path, device: torch.device
) -> dict[str, tuple[Path, Side]]:
    """The folder of each side's model, and its training."""
    dense = save_dense(options, folder / "dense", device)
    sides: dict[str, tuple[Path, Side]] = {
        TRAINER: (dense, partial(train_with_trainer, options, dense, str(device))),
        DENSE: (dense, partial(train_with_ours, options, dense)),
    }
    for ratio in options.ratios:
        hybrid = save_hybrid(options, dense, folder / f"hybrid-{ratio:g}", ratio)
        sides[f"ours, ratio {ratio:g}"] = (hybrid, partial(train_with_ours, options, hybrid))
    return sides


def save_dense(options: Options, folder: Path, device: torch.device) -> Path:
    name = options.model
    known = find_model(name) if "/" in name or name.startswith("tiny") else None
    if known is not None:
        return known
    model: Any = make_dense(read_shape(name)[0], device, torch.bfloat16, attention="sdpa")
    model.save_pretrained(folder)
    return folder


def save_hybrid(options: Options, dense: Path, folder: Path, ratio: float) -> Path:
    model: Any = AutoModelForCausalLM.from_pretrained(dense, attn_implementation="bosch")
    config = model.config
    z = spread_mask(ratio, config.num_hidden_layers, config.num_key_value_heads)
    deploy(model, z, options.window).save_pretrained(folder)
    return folder


def flops_of_a_step(options: Options, model: Path) -> int:
    config = AutoConfig.from_pretrained(model)
    return training_flops(config, count_weights(config).active, [options.length] * options.batch)


def make_rows(options: Options, vocab_size: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(0)
    shape = (options.batch * (options.steps + 1), options.length)
    return generator.integers(5, vocab_size, shape, dtype=np.uint32)


def train_with_ours(options: Options, model: Path) -> None:
    from training.loop import TrainJob, train

    rows = make_rows(options, AutoConfig.from_pretrained(model).vocab_size)
    nothing = np.empty(0, np.uint64)
    order = np.arange(len(rows), dtype=np.uint32)[None]
    tokens = TokenFolder(
        Path("memory"),
        {"seq_len": options.length},
        Sequences(rows, nothing),
        Sequences(rows[:0], nothing),
        order,
    )
    settings = TrainConfig(
        batch_sequences=options.batch,
        micro_batch_sequences=options.batch,
        precision=options.precision,
        checkpoint_steps=10**6,
    )
    with tempfile.TemporaryDirectory() as folder:
        train(TrainJob(settings, model, tokens, Path(folder) / "train", rows.size, ()))


def train_with_trainer(options: Options, folder: Path, device: str) -> None:
    from transformers import Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", use_cache=False
    )
    rows = make_rows(options, model.config.vocab_size).astype(np.int64)
    examples = [{"input_ids": row, "labels": row} for row in torch.from_numpy(rows)]
    on_gpu = not device.startswith("cpu")
    # What ours does there too.
    on_gpu_only: dict[str, Any] = {}
    if on_gpu:
        on_gpu_only = {"gradient_checkpointing": True, "use_liger_kernel": True}
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out,
            per_device_train_batch_size=options.batch,
            max_steps=options.steps + 1,
            learning_rate=1e-5,
            adam_beta2=0.95,
            weight_decay=0.1,
            bf16=options.precision == "bf16",
            use_cpu=not on_gpu,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **on_gpu_only,
        )
        Trainer(model, arguments, train_dataset=examples).train()


# ---------------------------------------------------------------------------------------- measuring


def seconds_of_a_step(side: Side, device: torch.device) -> float:
    with optimizer_steps(device) as times:
        side()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next side, or a process beside this one, needs the room
    return (times[-1] - times[0]) / (len(times) - 1)


@contextmanager
def optimizer_steps(device: torch.device) -> Iterator[list[float]]:
    """When each optimizer step ended, whichever optimizer made it."""
    times: list[float] = []
    handle = register_optimizer_step_post_hook(lambda *_: times.append(now(device)))
    try:
        yield times
    finally:
        handle.remove()


def peak_memory(options: Options, side: Side, device: torch.device) -> int | None:
    """Of a process that does nothing else, but for what importing takes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_peak_memory_here, options, side, device).result()


def _peak_memory_here(options: Options, side: Side, device: torch.device) -> int | None:
    torch.set_num_threads(options.threads)
    peak = PeakMemory(device)
    side()
    return peak.read()
