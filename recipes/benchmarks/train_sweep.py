"""Learning rates and batches for a small model: validation loss against tokens, run by run.

The model gets the `interleave` mask and trains on toy tokens, in which no NIAH template is. Runs
that are done are kept in the work folder: the same command goes on where it was stopped. What it
found for the embedded model stands in presets.tiny.
"""

import json
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bosch import progress
from bosch.config import TokenCount
from bosch.methods.interleave import full_layers
from recipes import prepare_tokens, presets
from recipes.benchmarks._options import BenchmarkOptions
from recipes.benchmarks._timing import show_table

SHOWS_TABLE = True


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: str = presets.TINY_MODEL
    ratio: float = 0.75
    window: int = 64
    seq_len: int = 1024
    tokens: TokenCount = 786_432
    """Of one run."""
    batches: tuple[int, ...] = (4, 8, 16)
    """Sequences of a step."""
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    """Peak learning rates."""
    points: int = 4
    """Validation losses of a run, behind the one at step 0."""
    threads: int = 1
    work: Path = Path("runs/train-sweep")
    """Folder for tokens and runs."""


def measure(options: Options) -> list[dict[str, Any]]:
    torch.set_num_threads(options.threads)
    model = make_hybrid_folder(options)
    tokens = make_tokens(options)
    rows = []
    for batch in options.batches:
        for rate in options.rates:
            rows.append(run_once(options, model, tokens, batch, rate))
            progress.say(f"{rows[-1]['name']}: {rows[-1]['value']:.4f}")
    shares = [f"at {row}/{options.points}" for row in range(options.points + 1)]
    show_table(
        f"validation loss, {options.tokens:,} tokens, ratio {options.ratio:g}",
        ("batch", "rate", *shares, "minutes"),
        [
            (
                row["batch_sequences"],
                f"{row['peak_learning_rate']:g}",
                *(f"{loss:.4f}" for loss in row["losses"]),
                f"{row['seconds'] / 60:.1f}",
            )
            for row in rows
        ],
    )
    return rows


def run_once(
    options: Options, model: Path, tokens: Path, batch: int, rate: float
) -> dict[str, Any]:
    from data.loader import open_tokens
    from training.loop import TrainJob, train

    folder = options.work / f"{model.name}-{options.tokens}-b{batch}-lr{rate:g}"
    result = folder / "result.json"
    if result.is_file():
        return dict(json.loads(result.read_text()))
    shutil.rmtree(folder, ignore_errors=True)  # half a run has another wall time
    folder.mkdir(parents=True)
    settings = replace(
        presets.tiny().train, batch_sequences=batch, peak_learning_rate=rate, checkpoint_steps=10**6
    )
    packed = open_tokens(tokens, prepare_tokens.read_tokenizer(options.model).hash)
    shares = tuple(point / options.points for point in range(options.points + 1))
    begin = time.monotonic()
    train(TrainJob(settings, model, packed, folder, options.tokens, shares))
    seconds = time.monotonic() - begin
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    row = {
        "name": f"validation loss, batch {batch}, peak rate {rate:g}",
        "value": losses[-1],
        "unit": "nats",
        "batch_sequences": batch,
        "peak_learning_rate": rate,
        "tokens": options.tokens,
        "losses": losses,
        "seconds": seconds,
    }
    for path in [folder / "checkpoints", *folder.glob("step-*")]:
        shutil.rmtree(path)
    result.write_text(json.dumps(row))
    return row


def make_hybrid_folder(options: Options) -> Path:
    """The model with whole layers windowed, every so many one full."""
    from transformers import AutoModelForCausalLM

    from bosch.hybrid.models import deploy

    source = presets.find_model(options.model) or Path(options.model)
    folder = options.work / f"{source.name}-interleave-{options.ratio:g}-{options.window}"
    if (folder / "config.json").is_file():
        return folder
    plain = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="bosch"
    )
    config = plain.config
    num_full = config.num_hidden_layers - round(options.ratio * config.num_hidden_layers)
    full = full_layers(config.num_hidden_layers, num_full)
    z = [
        [int(layer in full)] * config.num_key_value_heads
        for layer in range(len(plain.model.layers))
    ]
    hybrid = deploy(plain, z, options.window)
    hybrid.config.dtype = torch.float32
    hybrid.save_pretrained(folder)
    return folder


def make_tokens(options: Options) -> Path:
    """Toy tokens of the model's tokenizer, as the stage `tokens` packs them."""
    from bosch.run_folder import RunFolder
    from data.pack import PackConfig

    config = PackConfig(seq_len=options.seq_len, tokens=options.tokens)
    stage = prepare_tokens.make_stage(f"tokens-{options.tokens}", options.model, ("toy",), config)
    with RunFolder(options.work, say=progress.say) as run:
        return run.complete(stage).folder
