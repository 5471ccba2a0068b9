"""Learning rates, batches and token budgets for a small model, by what they are for: the share of
the lost NIAH points that training regains.

For each method the model gets the method's mask, is judged, trains on toy tokens, in which no NIAH
template is, and is judged again, by the suites of recover.py. Runs that are done are kept in the
work folder: the same command goes on where it stopped. What it found for the embedded model stands
in presets.tiny.
"""

import json
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from bosch import progress
from bosch.config import Config, parse_count
from bosch.manifest import write_atomically
from bosch.run_folder import RunFolder
from eval.results import collect_results
from eval.settings import Label
from recipes import evaluate_model, materialize_model, prepare_tokens, presets, search_mask
from recipes.benchmarks._options import BenchmarkOptions
from recipes.benchmarks._timing import show_table

SHOWS_TABLE = True


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: str = presets.TINY_MODEL
    methods: tuple[str, ...] = ("interleave", "random_groups")
    """Those that read no calibration set."""
    ratio: float = 0.75
    window: int = 64
    seed: int = 0
    """Of random_groups."""
    seq_len: int = 1024
    budgets: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TOKENS")] = ("131072",)
    """Of one run."""
    batches: tuple[int, ...] = (2, 8)
    """Sequences of a step."""
    rates: tuple[float, ...] = (1e-3, 3e-3)
    """Peak learning rates."""
    lengths: tuple[int, ...] = (512, 1024)
    """Of NIAH."""
    samples: int = 16
    """Test examples of each task, and of each length of NIAH."""
    threads: int = 1
    work: Path = Path("runs/train-sweep")
    """Folder for tokens and runs."""


def measure(options: Options) -> list[dict[str, Any]]:
    torch.set_num_threads(options.threads)
    dense = judge(options, options.model, "dense")
    budgets = [parse_count(budget) for budget in options.budgets]
    tokens = make_tokens(options, max(budgets))
    rows = []
    for method in options.methods:
        model = make_hybrid(options, method)
        start = judge(options, str(model), f"{model.parent.name}-start")
        progress.say(f"{method}: NIAH {start['niah']:.1f}, of the dense model {dense['niah']:.1f}")
        for budget in budgets:
            for batch in options.batches:
                for rate in options.rates:
                    run = Run(method, model, tokens, budget, batch, rate)
                    rows.append(row_of(run, dense, start, train_and_judge(options, run)))
                    progress.say(f"{rows[-1]['name']}: {rows[-1]['value']:.0f} %")
    show_table(
        f"recovery at ratio {options.ratio:g}, in per cent; NIAH of the dense model "
        f"{dense['niah']:.1f}, toy LongBench {dense['longbench']:.1f}",
        ("mask", "tokens", "batch", "rate", "NIAH", "regained", "LongBench", "loss", "core min"),
        [
            (
                row["method"],
                f"{row['tokens']:,}",
                row["batch_sequences"],
                f"{row['peak_learning_rate']:g}",
                f"{row['niah'][0]:.1f} -> {row['niah'][1]:.1f}",
                f"{row['value']:.0f}",
                f"{row['longbench'][0]:.1f} -> {row['longbench'][1]:.1f}",
                f"{row['losses'][0]:.3f} -> {row['losses'][-1]:.3f}",
                f"{row['core_minutes']:.1f}",
            )
            for row in rows
        ],
    )
    return rows


@dataclass(frozen=True)
class Run:
    """One training."""

    method: str
    model: Path
    tokens: Path
    budget: int
    batch: int
    rate: float

    @property
    def folder_name(self) -> str:
        return f"{self.model.parent.name}-{self.budget}-b{self.batch}-lr{self.rate:g}"


def row_of(
    run: Run, dense: dict[str, float], start: dict[str, float], end: dict[str, Any]
) -> dict[str, Any]:
    lost = dense["niah"] - start["niah"]
    return {
        "name": f"{run.method}, {run.budget:,} tokens, batch {run.batch}, peak rate {run.rate:g}: "
        "lost NIAH points regained",
        "value": 100 * (end["niah"] - start["niah"]) / lost if lost > 0 else 0.0,
        "unit": "%",
        "method": run.method,
        "tokens": run.budget,
        "batch_sequences": run.batch,
        "peak_learning_rate": run.rate,
        "niah_dense": dense["niah"],
        "longbench_dense": dense["longbench"],
        "niah": [start["niah"], end["niah"]],
        "longbench": [start["longbench"], end["longbench"]],
        "losses": end["losses"],
        "core_minutes": end["core_minutes"],
    }


def train_and_judge(options: Options, run: Run) -> dict[str, Any]:
    """Scores, validation losses and CPU time of a run, kept in its folder once it is done."""
    from data.loader import open_tokens
    from training.loop import TrainJob, train

    folder = options.work / run.folder_name
    result = folder / "result.json"
    if result.is_file():
        return dict(json.loads(result.read_text()))
    shutil.rmtree(folder, ignore_errors=True)  # half a run has another time
    folder.mkdir(parents=True)
    settings = replace(
        presets.tiny().train,
        batch_sequences=run.batch,
        peak_learning_rate=run.rate,
        checkpoint_steps=10**6,
    )
    packed = open_tokens(run.tokens, prepare_tokens.read_tokenizer(options.model).hash)
    began = time.process_time()
    train(TrainJob(settings, run.model, packed, folder, run.budget))
    core_minutes = (time.process_time() - began) / 60
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    (trained,) = folder.glob("step-*")
    scores = judge(options, str(trained), f"{run.folder_name}/judged")
    found = {**scores, "losses": losses, "core_minutes": core_minutes}
    shutil.rmtree(folder / "checkpoints")
    write_atomically(result, json.dumps(found))
    return found


# ------------------------------------------------------------------------------ stages of the chain


def config_of(options: Options, method: str) -> Config:
    config = presets.tiny(options.model)
    judging = replace(
        config.eval,
        niah_lengths=options.lengths,
        niah_samples=options.samples,
        longbench_rows=options.samples,
    )
    return replace(
        config,
        method=method,
        ratio=options.ratio,
        window=options.window,
        seed=options.seed,
        eval=judging,
    )


def make_hybrid(options: Options, method: str) -> Path:
    """The model with the method's mask, untrained."""
    config = config_of(options, method)
    mask = search_mask.build(config, None)
    with RunFolder(
        options.work / f"{method}-r{options.ratio:g}-s{options.seed}", say=progress.say
    ) as run:
        run.complete(mask)
        return run.complete(materialize_model.build(config, mask)).folder


def make_tokens(options: Options, budget: int) -> Path:
    """Toy tokens of the model's tokenizer, as the stage `tokens` packs them."""
    config = presets.tiny(options.model)
    packing = replace(config.data, tokens=budget, sequence_length=options.seq_len)
    with RunFolder(options.work / f"data-{budget}-{options.seq_len}", say=progress.say) as run:
        return run.complete(prepare_tokens.build(replace(config, data=packing))).folder


def judge(options: Options, model: str, name: str) -> dict[str, float]:
    """Averages of NIAH and toy LongBench, as recover.py judges."""
    config = config_of(options, "interleave")
    judging = evaluate_model.judging_of(config, presets.read_shape(options.model).positions)
    folder = options.work / name
    stage = evaluate_model.make_stage(
        "scores", model, judging, Label(name), options.work / "shared"
    )
    with RunFolder(folder, say=progress.say) as run:
        run.complete(stage)
    rows = collect_results(folder, name)
    return {row["suite"]: row["value"] for row in rows if row["task"] == "average"}
