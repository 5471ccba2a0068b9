"""Searches against the truth: every mask of the two-layer model is scored once, then each search is
run on that table with many seeds. How often does it find the best mask, how close does it come?

The scores are kept in a small file, so that the table need not be computed again; so is a row for
each search, and the same command goes on where it stopped.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from bosch.config import Config
from bosch.manifest import STARTED
from bosch.mask import num_windowed
from bosch.model_folder import read_model_info
from bosch.plugins import load_plugin
from bosch.progress import say, track
from bosch.search.evaluations import MaskObjective
from bosch.search.journal import texts_of
from bosch.search.memo import Memo, Scores, locate_memo, scoring_facts
from bosch.search.objective import Rows, Value, find_anchors, rounded, weighted
from bosch.search.optimizers._interface import Bits, Problem, optimize
from bosch.search.scorer import Scorer
from recipes import presets
from recipes.benchmarks._options import BenchmarkOptions
from recipes.benchmarks._search import Setup, add_row, grouped, read_rows, search, set_up

Table = dict[Rows, Scores]

METHODS = ("bosch", "bosch_plus", "global_swap", "bosch_single")
OPTIMIZERS = ("nomad", "nomad_repair", "one_plus_one", "swap")
SMOOTH = "accuracy+probability"
OBJECTIVES = ("accuracy", SMOOTH)
WITHIN = 0.01  # of the best: close enough


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: str = presets.SMOKE_MODEL
    ratios: tuple[float, ...] = (0.5, 0.75)
    seeds: int = 20
    kappa: int = 30
    """Evaluations a layer. Every search may make as many as `bosch` plans with it."""
    length: int = 256
    """Of a calibration context."""
    examples: int = 32
    """Calibration questions, two in a context."""
    values: Path = Path("benchmarks/search-truth-2layer.npz")
    """Scores of all masks."""
    rows: Path = Path("benchmarks/search-truth-2layer.jsonl")
    """A line for each search."""
    runs: Path = Path("runs/search")
    """Where calibration sets are kept."""


def measure(options: Options) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    setup = set_up(config_of(options), options.runs)
    truth = Truth(setup, options)
    rows = rows_about(options.rows, truth.about, options.kappa)
    truth.budgets = {r["ratio"]: r["evaluations"] for r in rows if is_first_bosch(r, options)}
    done = {key_of(row) for row in rows}
    names = (*METHODS, *bare_names())
    for seed, ratio, name in product(range(options.seeds), options.ratios, names):
        if (name, ratio, options.kappa, seed) not in done:
            add_row(options.rows, truth.row_of(name, ratio, seed))
    return summarize(rows_about(options.rows, truth.about, options.kappa), truth.tables)


def rows_about(path: Path, about: dict[str, Any], kappa: int) -> list[dict[str, Any]]:
    """The searches on this model and calibration set, with so many evaluations a layer."""
    return [row for row in read_rows(path) if (row["about"], row["kappa"]) == (about, kappa)]


def config_of(options: Options) -> Config:
    config = presets.smoke(options.model)
    calibration = replace(config.calibration, examples=options.examples, length=options.length)
    return replace(config, calibration=calibration, mask=replace(config.mask, kappa=options.kappa))


def bare_names() -> list[str]:
    """Optimizers over all groups at once, each with both objectives."""
    return [f"{name}, {by}" for by in OBJECTIVES for name in OPTIMIZERS]


def is_first_bosch(row: dict[str, Any], options: Options) -> bool:
    return key_of(row) == ("bosch", row["ratio"], options.kappa, 0)


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("search", "ratio", "kappa", "seed"))


# ---------------------------------------------------------------------------------------- the table


class Truth:
    """All masks with their scores, and searches among them."""

    def __init__(self, setup: Setup, options: Options) -> None:
        self.setup, self.kappa, self.runs = setup, options.kappa, options.runs / "truth"
        self.shape = presets.read_shape(options.model).groups
        folder = self.open_run("all")
        info = read_model_info(setup.folder)
        facts = scoring_facts(setup.model, info, setup.calibration, setup.config.window)
        # Searches read the scores as they would those of an earlier run: from the memo on the disk.
        self.memo = Memo(locate_memo(folder, facts), facts)
        scorer = Scorer(setup.model, setup.calibration, setup.config.window)
        self.objectives = {
            name: MaskObjective(scorer, setup.calibration, name, memo=self.memo)
            for name in OBJECTIVES
        }
        self.about = {name: facts[name] for name in ("model", "calibration", "window_tokens")}
        self.tables = self.read_or_score(options, self.about)
        self.budgets: dict[float, int] = {}  # evaluations that `bosch` makes

    def open_run(self, name: str) -> Path:
        """A folder that is a stage's, so that a search there uses the memo."""
        folder = self.runs / name / "mask"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STARTED).touch()
        return folder

    def read_or_score(self, options: Options, about: dict[str, Any]) -> dict[float, Table]:
        kept = read_values(options.values, about)
        tables = {}
        for ratio in options.ratios:
            masks = list(every_mask(ratio, *self.shape))
            if f"{ratio:g}" in kept:
                scores = [Scores(*map(float, row)) for row in kept[f"{ratio:g}"]]
                self.remember(masks, scores)
            else:
                scores = self.score(masks, ratio)
            tables[ratio] = dict(zip(masks, scores, strict=True))
        if any(f"{ratio:g}" not in kept for ratio in tables):
            write_values(options.values, about, kept, tables)
            say(f"wrote {options.values}")
        return tables

    def score(self, masks: Sequence[Rows], ratio: float) -> list[Scores]:
        """Masks that share their lower layers stand one behind another. A killed run goes on."""
        scores = []
        with track(f"all masks at {ratio:g}", len(masks), "masks") as bar:
            for z in masks:
                scores.append(scores_of(self.objectives["accuracy"](z)))
                bar.advance()
        return scores

    def remember(self, masks: Sequence[Rows], scores: Sequence[Scores]) -> None:
        for z, each in zip(masks, scores, strict=True):
            if self.memo.get(z) is None:
                self.memo.add(z, each)

    def row_of(self, name: str, ratio: float, seed: int) -> dict[str, Any]:
        """One search, and what its mask is worth."""
        run = self.run_bare if ", " in name else self.run_method
        z, evaluations = run(name, ratio, seed)
        if name == "bosch" and seed == 0:
            self.budgets[ratio] = evaluations
        return {
            "about": self.about,
            "search": name,
            "ratio": ratio,
            "kappa": self.kappa,
            "seed": seed,
            "evaluations": evaluations,
            "z": texts_of(z),
            **self.tables[ratio][z]._asdict(),
        }

    def run_method(self, name: str, ratio: float, seed: int) -> tuple[Rows, int]:
        folder = self.open_run(f"{name}-{ratio:g}-{seed}")
        found = search(self.setup, name, ratio, seed, folder)
        shutil.rmtree(folder.parent)
        return found.selection.mask.z, found.evaluations

    def run_bare(self, name: str, ratio: float, seed: int) -> tuple[Rows, int]:
        """An optimizer over all groups, from the dense model or the lowest groups on the window."""
        optimizer, by = name.split(", ")
        objective, table, shape = self.objectives[by], self.tables[ratio], self.shape

        def evaluate(bits: Bits, threshold: float | None) -> Value:
            z = rows_of_bits(bits, shape[1])
            scores = table.get(z) or scores_of(objective(z))  # NOMAD leaves the quota
            return Value(rounded(weighted(by, *scores)), True, *scores)

        problem = Problem(
            shape[0] * shape[1],
            num_windowed(ratio, *shape),
            evaluate,
            self.budgets[ratio],
            seed=seed,
            anchors=find_anchors(objective, *shape),
        )
        found = optimize(optimizer, problem)
        return rows_of_bits(found.bits, shape[1]), len(found.trials.table)


def every_mask(ratio: float, num_layers: int, num_groups: int) -> Iterator[Rows]:
    """In the order in which their values are kept."""
    num = num_layers * num_groups
    for windowed in combinations(range(num), num_windowed(ratio, num_layers, num_groups)):
        chosen = set(windowed)
        yield rows_of_bits([int(variable not in chosen) for variable in range(num)], num_groups)


def rows_of_bits(bits: Sequence[int], num_groups: int) -> Rows:
    return tuple(
        tuple(bits[start : start + num_groups]) for start in range(0, len(bits), num_groups)
    )


def scores_of(value: Value) -> Scores:
    assert value.accuracy is not None
    assert value.probability is not None
    assert value.log_probability is not None
    return Scores(value.accuracy, value.probability, value.log_probability)


def write_values(
    path: Path, about: dict[str, Any], kept: dict[str, Any], tables: dict[float, Table]
) -> None:
    """Beside those of other ratios. Float32 is enough: values are compared in steps of 1e-4."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = kept | {
        f"{ratio:g}": np.array(list(table.values()), dtype=np.float32)
        for ratio, table in tables.items()
    }
    temporary = path.with_suffix(".part.npz")
    np.savez_compressed(temporary, about=np.array(json.dumps(about)), **arrays)
    temporary.replace(path)


def read_values(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Nothing where there is no file, or where it is of another model or calibration set."""
    if not path.is_file():
        return {}
    with np.load(path) as kept:
        if json.loads(str(kept["about"])) != about:
            say(f"{path} is of another model or calibration set; all masks are scored again")
            return {}
        return {name: kept[name] for name in kept.files if name != "about"}


# --------------------------------------------------------------------------------- what came out


def summarize(rows: Sequence[dict[str, Any]], tables: dict[float, Table]) -> list[dict[str, Any]]:
    """A row for each search at each ratio: over the seeds, how far its masks are from the best by
    what it was after, and by accuracy and probability together.
    """
    summary = []
    for (name, ratio), runs in grouped(rows, "search", "ratio"):
        if ratio not in tables:
            continue
        by = objective_of(name)
        own = [best_of(tables[ratio], by) - value_of(row, by) for row in runs]
        smooth = [best_of(tables[ratio], SMOOTH) - value_of(row, SMOOTH) for row in runs]
        ranks = [rank_of(row, tables[ratio]) for row in runs]
        summary.append(
            {
                "name": f"{name} at {ratio:g}: finds the best mask by {by}",
                "value": 100 * mean(gap <= 0 for gap in own),
                "unit": "% of seeds",
                "search": name,
                "ratio": ratio,
                "objective": by,
                "seeds": len(runs),
                "masks": len(tables[ratio]),
                "evaluations": mean(row["evaluations"] for row in runs),
                "near": 100 * mean(gap <= WITHIN for gap in own),
                "gap": mean(own),
                "worst_gap": max(own),
                "smooth_gap": mean(smooth),
                "rank": median(ranks),
            }
        )
    return summary


def read_tables(options: Options) -> tuple[dict[str, Any], dict[float, Table]]:
    """What the scores are of, and all masks with theirs, from the file alone."""
    shape = presets.read_shape(options.model).groups
    tables = {}
    with np.load(options.values) as kept:
        for ratio in map(float, sorted(set(kept.files) - {"about"})):
            masks = every_mask(ratio, *shape)
            scores = [Scores(*map(float, row)) for row in kept[f"{ratio:g}"]]
            tables[ratio] = dict(zip(masks, scores, strict=True))
        return json.loads(str(kept["about"])), tables


def objective_of(name: str) -> str:
    if ", " in name:
        return name.split(", ")[1]
    return str(load_plugin("bosch.methods", name).Settings().objective)


def value_of(scores: dict[str, Any], by: str) -> float:
    parts = (float(scores[name]) for name in Scores._fields)
    return rounded(weighted(by, *parts))


def best_of(table: Table, by: str) -> float:
    return max(rounded(weighted(by, *scores)) for scores in table.values())


def mean_gap(table: Table, by: str) -> float:
    """Of a mask drawn at random."""
    return best_of(table, by) - mean(rounded(weighted(by, *scores)) for scores in table.values())


def rank_of(row: dict[str, Any], table: Table) -> int:
    """Place among all masks by accuracy and probability together, 1 the best."""
    own = value_of(row, SMOOTH)
    return 1 + sum(rounded(weighted(SMOOTH, *scores)) > own for scores in table.values())
