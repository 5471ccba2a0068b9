"""Tokens a second of our training loop beside Hugging Face's Trainer: same model, rows, precision
and batch, in turns.

Sides: the Trainer on the dense model, our loop on the dense model, and our loop on a hybrid with
the same weights. What counts is the time from one optimizer step to the next, whoever makes it;
starting, loading and exporting do not. Each side's peak memory is that of a process of its own.
"""

import gc
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
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
from benchmarks._options import DeviceOptions
from benchmarks._timing import describe_device, now, short, speedup
from benchmarks.estimate import count_weights
from bosch.config import TrainConfig
from bosch.data.loader import Sequences, TokenFolder
from bosch.hybrid.models import deploy
from bosch.model import find_model
from bosch.recipes.presets import TINY_MODEL
from bosch.run.tables import show_rows
from bosch.training.flops import peak_flops, training_flops

TRAINER, DENSE = "Trainer, dense", "ours, dense"
# Of the Trainer's speed. Met where the tiny model trains on a CPU with the default options.
AT_LEAST = {DENSE: 1.0, "ours, ratio 0.75": 1.15}
Side = Callable[[], None]  # trains for options.steps + 1 steps


@dataclass(frozen=True)
class Options(DeviceOptions):
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


def gpu_options() -> tuple[Options, ...]:
    """One sequence of the paper's recovery data, with Liger and the fastest backend."""
    return (Options(model="Qwen3-1.7B", length=32_768, window=1024, batch=1, precision="bf16"),)


def measure(options: Options) -> list[dict[str, Any]]:
    device = options.start()
    with tempfile.TemporaryDirectory() as folder:
        models = save_models(options, Path(folder), device)
        sides: dict[str, Side] = {
            name: partial(train_with_ours, options, model) for name, model in models.items()
        }
        models = {TRAINER: models[DENSE], **models}
        sides = {TRAINER: partial(train_with_trainer, options, models[DENSE], device), **sides}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, side in sides.items():
                seconds[name].append(seconds_of_a_step(side, device))
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
            peaks = {
                name: pool.submit(peak_memory, options, side, device).result()
                for name, side in sides.items()
            }
        flops = {}
        for name, model in models.items():
            config = AutoConfig.from_pretrained(model)
            lengths = [options.length] * options.batch
            flops[name] = training_flops(config, count_weights(config).active, lengths)
    peak = peak_flops(device)
    rows: list[dict[str, Any]] = []
    for name in sides:
        a_second = flops[name] / median(seconds[name])
        row = {
            "name": f"{options.model}, {short(options.length)} tokens, {name}, beside the Trainer",
            "value": speedup(seconds[TRAINER], seconds[name]),
            "unit": "times",
            "side": name,
            "tokens_per_second": options.batch * options.length / median(seconds[name]),
            "tflops_per_second": a_second / 1e12,
            "mfu": a_second / peak if peak and options.precision == "bf16" else None,
            "peak_bytes": peaks[name],
        }
        if device.type == "cpu" and name in AT_LEAST:
            row["at_least"] = AT_LEAST[name]
        rows.append(row)
    show_rows(
        f"{options.model}, batch {options.batch} x {short(options.length)} tokens, window "
        f"{options.window}, {options.precision}, {describe_device(device)}",
        rows,
        {
            "side": "side",
            "tokens/s": "tokens_per_second:,.0f",
            "times the Trainer": "value:.2f",
            "MFU": "mfu:.1%",
            "peak bytes": "peak_bytes:,",
        },
    )
    return rows


def save_models(options: Options, folder: Path, device: torch.device) -> dict[str, Path]:
    """The dense model and the hybrids made from it, a folder each."""
    name = options.model
    dense = find_model(name) if "/" in name or name.startswith("tiny") else None
    if dense is None:
        dense = folder / "dense"
        made = make_dense(read_shape(name)[0], device, torch.bfloat16, attention="sdpa")
        made.save_pretrained(dense)
    models = {DENSE: dense}
    for ratio in options.ratios:
        model: Any = AutoModelForCausalLM.from_pretrained(dense, attn_implementation="bosch")
        config = model.config
        z = spread_mask(ratio, config.num_hidden_layers, config.num_key_value_heads)
        models[f"ours, ratio {ratio:g}"] = folder / f"hybrid-{ratio:g}"
        deploy(model, z, options.window).save_pretrained(folder / f"hybrid-{ratio:g}")
    return models


def make_rows(options: Options, model: Path) -> np.ndarray[Any, Any]:
    vocab_size = AutoConfig.from_pretrained(model).vocab_size
    shape = (options.batch * (options.steps + 1), options.length)
    return np.random.default_rng(0).integers(5, vocab_size, shape, dtype=np.uint32)


def train_with_ours(options: Options, model: Path) -> None:
    from bosch.training.loop import TrainJob, train

    rows, nothing = make_rows(options, model), np.empty(0, np.uint64)
    tokens = TokenFolder(
        Path("memory"),
        {"seq_len": options.length},
        Sequences(rows, nothing),
        Sequences(rows[:0], nothing),
        np.arange(len(rows), dtype=np.uint32)[None],
    )
    settings = TrainConfig(
        batch_sequences=options.batch,
        micro_batch_sequences=options.batch,
        precision=options.precision,
        checkpoint_steps=10**6,
    )
    with tempfile.TemporaryDirectory() as folder:
        train(TrainJob(settings, model, tokens, Path(folder) / "train", rows.size, ()))


def train_with_trainer(options: Options, folder: Path, device: torch.device) -> None:
    from transformers import Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", use_cache=False
    )
    rows = torch.from_numpy(make_rows(options, folder).astype(np.int64))
    on_gpu = device.type != "cpu"
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out,
            per_device_train_batch_size=options.batch,
            max_steps=options.steps + 1,
            learning_rate=1e-5,
            adam_beta2=0.95,
            weight_decay=0.1,
            bf16=options.precision == "bf16",
            gradient_checkpointing=on_gpu,  # what ours does there too, as Liger's kernels
            use_liger_kernel=on_gpu,
            use_cpu=not on_gpu,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        examples: Any = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(model, arguments, train_dataset=examples).train()


def seconds_of_a_step(side: Side, device: torch.device) -> float:
    """From the end of one optimizer step to that of the next, whichever optimizer makes it."""
    ends: list[float] = []
    handle = register_optimizer_step_post_hook(lambda *_: ends.append(now(device)))
    try:
        side()
    finally:
        handle.remove()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next side, or a process beside this one, needs the room
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def peak_memory(options: Options, side: Side, device: torch.device) -> int | None:
    """Of this process; but for what importing takes, it does nothing else."""
    options.start()
    peak = PeakMemory(device)
    side()
    return peak.read()
