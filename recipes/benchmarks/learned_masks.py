"""Masks that are learned (ConSA) beside masks that are searched: one model, one budget of tokens.

A cell is a way to choose the mask, a ratio and a seed. Its hybrid is judged as it is and, with
`--train`, once more after the tokens that learning its mask has left of the budget: the total is
the same for all. Each result is a line of `--rows`, which is kept with the repository, and a cell
that has its line is not run again: the study can go on on another day and another machine. `--page`
makes the tables of docs/consa.md anew from the lines.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from bosch.config import Config
from bosch.manifest import provenance
from bosch.mask import MaskFile, read_mask
from bosch.model_folder import read_model_info
from bosch.plugins import suggest
from bosch.progress import say
from bosch.run_folder import RunFolder
from bosch.stage import Artifact, Stage
from eval.results import collect_results
from eval.rows import read_rows, write_line
from eval.settings import Label
from recipes import (
    calibrate,
    evaluate_model,
    materialize_model,
    prepare_tokens,
    presets,
    search_mask,
    train_model,
)
from recipes.benchmarks._learned_masks_page import write_page
from recipes.benchmarks._options import BenchmarkOptions

SHOWS_TABLE = True  # the rows are told one by one
ZERO_SHOT, TRAINED = "zero-shot", "trained"


@dataclass(frozen=True)
class Variant:
    """A way to choose the mask."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # other than the method's defaults


VARIANTS = {
    "consa": Variant("consa"),
    "consa, each layer": Variant("consa", {"granularity": "head-per-layer"}),
    "consa, whole layers": Variant("consa", {"granularity": "layer"}),
    "l1_gates": Variant("l1_gates"),
    "bosch": Variant("bosch"),
    "bosch_plus": Variant("bosch_plus"),
    "fisher": Variant("fisher"),
    "random_groups": Variant("random_groups"),
}


@dataclass(frozen=True)
class Cell:
    variant: str
    ratio: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant.replace(', ', '-').replace(' ', '-')}-r{self.ratio:g}-s{self.seed}"


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: str = presets.TINY_MODEL
    """A shipped model, with the settings of the preset `tiny`."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    ratios: tuple[float, ...] = (0.75, 0.5)
    seeds: tuple[int, ...] = (0, 1, 2)
    samples: int = 8
    """Test examples of each task and length, and rows of each data set."""
    tokens: int | None = None
    """The budget; None: the preset's."""
    train: bool = False
    """Train the hybrids too: most of the time that all of this takes."""
    runs: Path = Path("runs/learned-masks")
    """Where the runs are kept."""
    rows: Path = Path("benchmarks/tiny-qwen3-learned-masks.jsonl")
    """Where the results are kept."""
    page: Path | None = None
    """Page to write, docs/consa.md for the one of this repository; what stands above its tables
    stays."""

    def __post_init__(self) -> None:
        for name in self.variants:
            if name not in VARIANTS:
                raise ValueError(f"--variants {name}: {suggest(name, tuple(VARIANTS))}")
        if self.samples < 1:
            raise ValueError(f"--samples is {self.samples}, it must be at least 1.")


def measure(options: Options) -> list[dict[str, Any]]:
    """Run what has no line yet; the lines of this model."""
    cells = [Cell(v, r, s) for s, r, v in product(options.seeds, options.ratios, options.variants)]
    for state in (ZERO_SHOT, TRAINED) if options.train else (ZERO_SHOT,):
        for cell in cells:
            if (cell, state) not in {key_of(row) for row in known_rows(options)}:
                row = run_cell(cell, state, options)
                say(f"{cell.name}, {state}: NIAH {row['niah']['value']:.1f}")
                options.rows.parent.mkdir(parents=True, exist_ok=True)
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(write_line(row))
    rows = known_rows(options)
    if options.page:
        write_page(options.page, rows, list(VARIANTS))
        say(f"wrote {options.page}")
    return [
        {"name": "{variant}, ratio {ratio:g}, seed {seed}, {state}".format(**row), **row}
        | {"value": row["niah"]["value"], "unit": "%"}
        for row in rows
    ]


def known_rows(options: Options) -> list[dict[str, Any]]:
    """Those of this model's weights and text, judged by as many examples."""
    if not options.rows.is_file():
        return []
    decides = facts_of(options)
    return [row for row in read_rows(options.rows) if decides.items() <= row.items()]


def facts_of(options: Options) -> dict[str, Any]:
    config = config_of(Cell("random_groups", 0.5, 0), options)
    return {
        "text": prepare_tokens.build(config).fingerprint[:12],  # of seed 0
        "model": str(read_model_info(materialize_model.fetch_model(options.model))),
        "samples": options.samples,
        "lengths": list(config.eval.niah_lengths),
        "window": config.window,
        "budget_tokens": config.data.tokens,
    }


def key_of(row: Mapping[str, Any]) -> tuple[Cell, str]:
    return Cell(row["variant"], row["ratio"], row["seed"]), row["state"]


# ------------------------------------------------------------------------------------------ a cell


def config_of(cell: Cell, options: Options) -> Config:
    """The seed is that of the method, of its calibration set and of the packed tokens."""
    config = presets.tiny(options.model)
    data = replace(config.data, tokens=options.tokens or config.data.tokens)
    judging = replace(config.eval, samples=options.samples)
    method = VARIANTS[cell.variant].method
    return replace(config, method=method, ratio=cell.ratio, seed=cell.seed, data=data, eval=judging)


def run_cell(cell: Cell, state: str, options: Options) -> dict[str, Any]:
    path, config = options.runs / cell.name, config_of(cell, options)
    tokens = prepare_tokens.build(config)
    mask = mask_stage(cell, config, tokens)
    with RunFolder(path, say=say) as run:
        artifacts = {s.name: run.complete(s) for s in stages_before(config, mask, tokens)}
        record = read_mask(path / "mask" / "mask.json")
        learned = int(record.settings.get("learning_tokens", 0))
        packed, model = artifacts["tokens"].folder, artifacts["model"].folder
        steps, trained = 0, 0
        if state == TRAINED:
            left = config.data.tokens - learned
            inputs: dict[str, Stage | Artifact] = {
                "model": artifacts["model"],
                "tokens": artifacts["tokens"],
            }
            train = train_model.make_stage(
                "train", config.train, left, (1.0,), config.data.document_mask, inputs
            )
            model = sorted(run.complete(train).folder.glob("step-*"))[-1]
            steps = int(model.name.removeprefix("step-"))
            trained = steps * config.train.batch_sequences * config.data.sequence_length
    scores = judge(path, model, config, Label(cell.name, steps, trained), options)
    return {
        "variant": cell.variant,
        "ratio": cell.ratio,
        "seed": cell.seed,
        "state": state,
        **facts_of(options),
        "learning_tokens": learned,
        "training_tokens": trained,
        "niah": figure(scores, "niah", "string_match_all"),
        "longbench": figure(scores, "longbench", "mean"),
        "groups": {
            f"{row['task']} {row['length']}": row["value"]
            for row in scores
            if row["task"] in ("single", "multikey")
        },
        "validation_loss": validation_loss(model, packed),
        **describe_mask(record),
        "mask_seconds": json.loads((path / "mask" / "time.json").read_text())["seconds"],
        "commit": provenance()["commit"],
    }


def mask_stage(cell: Cell, config: Config, tokens: Stage) -> Stage:
    settings = search_mask.default_settings(config.method, config.mask)
    settings = replace(settings, **VARIANTS[cell.variant].settings)
    return search_mask.make_stage(config, settings, calibrate.build(config), tokens)


def stages_before(config: Config, mask: Stage, tokens: Stage) -> Iterator[Stage]:
    """Up to the hybrid. The tokens come in any case: the validation loss is on a part of them."""
    yield tokens
    calibration = mask.inputs.get("calibration")
    if isinstance(calibration, Stage):
        yield calibration
    yield mask
    yield materialize_model.build(config, mask)


def judge(
    run_path: Path, model: Path, config: Config, label: Label, options: Options
) -> list[dict[str, Any]]:
    """Rows of NIAH and toy LongBench, kept in the run's folder `eval`."""
    judging = evaluate_model.judging_of(config, presets.read_shape(config.model).positions)
    name = f"step-{label.step or 0:06d}"
    stage = evaluate_model.make_stage(name, str(model), judging, label, options.runs / "shared")
    with RunFolder(run_path / "eval", say=say) as run:
        run.complete(stage)
    rows = collect_results(run_path / "eval", run_path.name)
    return [row for row in rows if row["step"] == label.step]


def figure(rows: Sequence[Mapping[str, Any]], suite: str, metric: str) -> dict[str, Any]:
    """The average of a suite."""
    for row in rows:
        if (row["suite"], row["task"], row["metric"]) == (suite, "average", metric):
            return {name: row[name] for name in ("value", "stderr", "n")}
    raise ValueError(f"{suite} has no average: not all of its tasks can be built at these lengths.")


def validation_loss(model_folder: Path, tokens: Path) -> float:
    """Mean over the held-out tokens, documents apart, as training computes it."""
    import torch

    from data.loader import IGNORED, Loader, open_tokens

    model = evaluate_model.load_model(model_folder, evaluate_model.Judging(()))
    packed = open_tokens(tokens, prepare_tokens.read_tokenizer(str(model_folder)).hash)
    total, targets = 0.0, 0
    with torch.inference_mode():
        for batch in Loader(packed, 1).held_out(4):
            batch = batch.to(model.device)
            logits_BTV = model(
                batch.ids_BT, position_ids=batch.position_ids_BT, use_cache=False
            ).logits
            total += float(
                torch.nn.functional.cross_entropy(
                    logits_BTV.flatten(0, 1).float(),
                    batch.labels_BT.flatten(),
                    ignore_index=IGNORED,
                    reduction="sum",
                )
            )
            targets += batch.num_targets
    return total / targets


def describe_mask(record: MaskFile) -> dict[str, Any]:
    """The mask itself, so that its depth and nesting can be told without the run, and how far
    learning had come."""
    names = ("num_steps", "sequence_tokens", "closed_by_threshold", "window_share")
    return {
        "z": record.mask.row_texts(),
        "unit": record.mask.unit,
        "learned": {name: record.settings[name] for name in names if name in record.settings},
    }
