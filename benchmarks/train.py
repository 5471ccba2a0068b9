"""Compare the speed of our training loop with Hugging Face's Trainer, on the same model and data.

Sides: the Trainer on the dense model, our loop on the dense model, and our loop on a hybrid with
the same weights, in turns, with the same precision and batch. We time from one optimizer step to
the next, without starting, loading and exporting. On a CPU, a peak is that of one process per side.
"""

import gc
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from benchmarks import _measure
from benchmarks._measure import DeviceOptions, PeakMemory, Row, now, short, speedup
from bosch.config import TrainConfig
from bosch.data.loader import Sequences, TokenFolder
from bosch.hybrid.conversion import deploy, head_size
from bosch.masks.mask import spread_mask
from bosch.model import LOCAL, find_model
from bosch.recipes.presets import TINY_MODEL
from bosch.run.tensorboard import METRICS, read_metrics
from bosch.sink import Sink, SinkConstants
from bosch.training.metrics import count_active_weights, peak_flops, training_flops
from bosch.training.model_start import build_on_meta

TRAINER, DENSE = "Trainer, dense", "ours, dense"
# Speed relative to the Trainer. Holds for the tiny model on a CPU with the default options.
AT_LEAST = {DENSE: 1.0, "ours, ratio 0.75": 1.15}
TITLE = "{model}, batch {batch} x {length:,} tokens, window {window}, {precision}, {place}"
COLUMNS = {"side": "side", "tokens/s": "tokens_per_second:,.0f", "speed-up": "value:.2f"}
COLUMNS |= {"MFU": "mfu:.1%", "peak bytes": "peak_bytes:,"}
Precision = Literal["fp32", "bf16", "fp8", "fp8-rowwise"]
Side = Callable[[], object]  # trains for options.steps + 1 steps


@dataclass(frozen=True)
class Options(DeviceOptions):
    # A folder, an embedded model, or a known model (mini, Qwen3-1.7B) with random weights.
    model: str = TINY_MODEL
    length: int = 2048  # tokens in a sequence
    window: int = 64  # window size in tokens
    # Shares of KV groups on the sliding window, one hybrid for each.
    ratios: tuple[float, ...] = (0.75,)
    sinks: tuple[str, ...] = ("none",)  # none, static or tokens=S: a hybrid of each ratio and sink
    documents: int = 1  # in each sequence
    batch: int = 2  # sequences in a step, computed at once
    steps: int = 3  # steps timed in each round, after one that is not timed
    rounds: int = 3  # how often each side is timed
    precision: Precision = "fp32"  # number format of the computation


def measure(options: Options) -> Iterator[Row]:
    device = options.start()
    with tempfile.TemporaryDirectory() as folder:
        models = save_models(options, Path(folder), device)
        trainer = partial(train_with_trainer, options, models[DENSE], device)
        sides: dict[str, Side] = {TRAINER: trainer}
        sides |= {name: partial(train_with_ours, options, model) for name, model in models.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        peaks: dict[str, int | None] = {}
        for _ in range(options.rounds):
            for name, side in sides.items():
                memory = PeakMemory(device)
                seconds[name].append(seconds_of_a_step(side, device))
                peaks[name] = memory.read()
        if device.type == "cpu":  # where a peak is that of the process
            spawn = multiprocessing.get_context("spawn")
            # Each side in a new process: memory that one side freed stays with the process.
            with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
                found = [pool.submit(peak_memory, options, side) for side in sides.values()]
                peaks = {name: each.result() for name, each in zip(sides, found, strict=True)}
        flops = []
        for name in sides:
            config = AutoConfig.from_pretrained(models.get(name, models[DENSE]), **LOCAL)
            weights = count_active_weights(build_on_meta(config))
            flops.append(training_flops(config, weights, [options.length] * options.batch))
    peak = peak_flops(device) if options.precision == "bf16" else None
    for name, step_flops in zip(sides, flops, strict=True):
        flops_per_second = step_flops / median(seconds[name])
        about = f"{options.model}, {short(options.length)} tokens, {name}, beside the Trainer"
        row: Row = {"name": about, "value": speedup(seconds[TRAINER], seconds[name])}
        row |= {"unit": "times", "side": name}
        row["tokens_per_second"] = options.batch * options.length / median(seconds[name])
        row |= {"tflops_per_second": flops_per_second / 1e12}
        row |= {"mfu": flops_per_second / peak if peak else None, "peak_bytes": peaks[name]}
        if device.type == "cpu" and name in AT_LEAST:
            row["at_least"] = AT_LEAST[name]
        yield row


def save_models(
    options: Options, folder: Path, device: torch.device, sizes: Mapping[str, object] | None = None
) -> dict[str, Path]:
    """The folders of the dense model and of the hybrids made from it. sizes: of a known model with
    random weights, what differs in its config."""
    name = options.model
    dense = find_model(name) if "/" in name or name.startswith("tiny") else None
    if dense is None:
        dense = folder / "dense"
        known = _measure.read_shape(name)
        # `layer_types` has an entry for each layer of the known model; of fewer it is made again.
        shape = type(known)(**{**known.to_dict(), "layer_types": None, **(sizes or {})})
        _measure.make_model(shape, device, torch.bfloat16, "sdpa").save_pretrained(dense)
    models = {DENSE: dense}
    for ratio, sink in product(options.ratios, options.sinks):
        model: Any = AutoModelForCausalLM.from_pretrained(
            dense, attn_implementation="bosch", **LOCAL
        )
        z = spread_mask(ratio, model.config.num_hidden_layers, model.config.num_key_value_heads)
        title = f"ours, ratio {ratio:g}" + ("" if sink == "none" else f", sink {sink}")
        models[title] = folder / f"hybrid-{ratio:g}-{sink}"
        chosen = random_sink(model.config) if sink == "static" else Sink.parse(sink)
        deploy(model, z, options.window, chosen).save_pretrained(models[title])
    return models


def random_sink(config: PretrainedConfig) -> Sink:
    shape = config.num_hidden_layers, config.num_key_value_heads, head_size(config)
    constants = SinkConstants(torch.randn(shape), torch.randn(shape))
    return Sink("static", constants=constants)


def random_sequences(options: Options, model: Path) -> NDArray[np.uint32]:
    vocab_size = AutoConfig.from_pretrained(model, **LOCAL).vocab_size
    shape = (options.batch * (options.steps + 1), options.length)
    # The first ids are special in most tokenizers.
    return np.random.default_rng(0).integers(5, vocab_size, shape, dtype=np.uint32)


def settings_of(options: Options, **changes: Any) -> TrainConfig:
    settings = TrainConfig(
        batch_sequences=options.batch,
        micro_batch_sequences=options.batch,
        precision=options.precision,
        checkpoint_steps=10**6,  # none while steps are timed
    )
    return replace(settings, **changes)


def train_with_ours(options: Options, model: Path, **changes: Any) -> list[Row]:
    """The lines of the record, one for each step."""
    from bosch.training.loop import TrainJob, train

    sequences, no_ends = random_sequences(options, model), np.empty(0, np.uint64)
    inner = [options.length * n // options.documents for n in range(1, options.documents)]
    starts = np.arange(len(sequences))[:, None] * options.length
    ends = (starts + np.array(inner, int)).ravel().astype(np.uint64)
    whole, empty = Sequences(sequences, ends), Sequences(sequences[:0], no_ends)
    order = np.arange(len(sequences), dtype=np.uint32)[None]
    tokens = TokenFolder(Path("memory"), {"seq_len": options.length}, whole, empty, order)
    settings = settings_of(options, **changes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train"
        train(TrainJob(settings, model, tokens, path, sequences.size, ()))
        return read_metrics(path / METRICS)[1:]


def train_with_trainer(options: Options, folder: Path, device: torch.device) -> None:
    from transformers import Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(
        folder, use_cache=False, dtype=torch.float32, attn_implementation="sdpa", **LOCAL
    )
    sequences = torch.from_numpy(random_sequences(options, folder).astype(np.int64))
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
            use_cpu=not on_gpu,
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            # As our loop does on GPUs, which also compiles there: the Trainer by default does not.
            gradient_checkpointing=on_gpu,
            use_liger_kernel=on_gpu,
        )
        arguments._n_gpu = min(1, arguments.n_gpu)  # else it takes all that are seen, each a batch
        examples: Any = [{"input_ids": ids, "labels": ids} for ids in sequences]
        Trainer(model, arguments, train_dataset=examples).train()


def seconds_of_a_step(side: Side, device: torch.device) -> float:
    """From the end of one optimizer step to the end of the next, in either loop."""
    ends: list[float] = []
    # The one event that both loops have: ours and the Trainer's set up and log at other places.
    handle = register_optimizer_step_post_hook(lambda *_: ends.append(now(device)))
    try:
        side()
    finally:
        handle.remove()
    gc.collect()
    torch.cuda.empty_cache()  # for the next side, or for another process
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def peak_memory(options: Options, side: Side) -> int | None:
    """Of one side, run in this process, which does nothing else."""
    peak = PeakMemory(options.start())
    side()
    return peak.read()
