"""Compare mask searches on synthetic models: held-out answers, evaluations and layer-forwards.

    python -m benchmarks search_synthetic --methods bosch global_swap,kappa=60 best --out rows.json

A method is a name of bosch/methods, followed by its settings. Methods that rank
groups by attention weights get the same kind of noisy ranking; `best` is a swap search that starts
from the true importances, takes --best-evaluations and sees every value exactly. Rows that the file
--out holds are not made again. benchmarks/_synthetic.py describes the models.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks._options import BenchmarkOptions, Row
from benchmarks._synthetic import FAMILIES, Spec, SyntheticModel, choose, inputs_of
from bosch.config import MaskConfig
from bosch.masks.mask import num_windowed
from bosch.methods._settings import default_settings
from bosch.plugin_options import with_options
from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.progress import track
from bosch.run.tables import show_table
from bosch.search.objective import Value, rounded, weighted
from bosch.search.optimizers._interface import Assignment, Problem, optimize

BEST = "best"
OBJECTIVE = "accuracy+probability"  # of `best`, and of `value` in the rows
FACTS = ("size", "family", "pairs", "ratio", "seed", "kappa", "optimizer")  # of a row
COSTS = {
    "evaluations": "evaluations",
    "layer-forwards": "layer_forwards",
    "CPU s": "cpu_seconds",
}
SCALES = {"accuracy": 100.0, "probability": 100.0, "log_probability": 1.0, "value": 100.0}


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    methods: tuple[str, ...] = (
        "bosch_plus",
        "bosch",
        "bosch_single",
        "bosch_multi",
        "bosch_layer",
        "global_swap",
        "fisher",
        "single_group",
        "random_groups",
        BEST,
    )
    baseline: str | None = None  # the method to compare with; None: the first
    sizes: tuple[str, ...] = ("8x8",)  # layers x groups
    families: tuple[str, ...] = ("even", "heavy")  # even, heavy, published
    patterns: Path | None = None  # of the family `published`: a table of numbers, layers x heads
    pairs: tuple[bool, ...] = (False, True)  # without and with groups that stand in for each other
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75, 0.875)  # ratios to search masks for
    seeds: int = 20  # models of each kind, and seeds of the searches
    kappa: int = 30  # masks tried per layer
    # In place of NOMAD, which takes ten times as long as all else here. `nomad`: NOMAD.
    optimizer: str = "one_plus_one"
    best_evaluations: int = 20_000  # of `best`
    best_seeds: int = 5  # models for which `best` is searched
    shown: str = "accuracy"  # of the held-out questions: a field of the rows' `held_out`
    processes: int = 1  # searches at once

    def __post_init__(self) -> None:
        for family in self.families:
            if family not in FAMILIES:
                raise UserError(f"--families {family}: {suggest(family, FAMILIES)}")
        if "published" in self.families and not (self.patterns and self.patterns.is_file()):
            raise MissingFileError(
                f"--patterns {self.patterns}: the family `published` needs a file of head scores."
            )
        if self.shown not in SCALES:
            raise UserError(f"--shown {self.shown}: {suggest(self.shown, list(SCALES))}")
        if self.compared not in self.methods:
            raise UserError(f"--baseline {self.baseline} is not one of --methods.")

    @property
    def compared(self) -> str:
        return self.methods[0] if self.baseline is None else self.baseline


def measure(options: Options) -> Iterator[Row]:
    """One row for each model and ratio, with the results of all methods."""
    known = read_rows(options.out)
    rows = []
    for seed in range(options.seeds):
        for size, family, pairs, ratio in product(
            options.sizes, options.families, options.pairs, options.ratios
        ):
            facts = (size, family, pairs, ratio, seed, options.kappa, options.optimizer)
            rows.append(dict(zip(FACTS, facts, strict=True)) | {"results": known.get(facts, {})})
    done = []
    with (
        ProcessPoolExecutor(options.processes, get_context("spawn")) as pool,
        track("synthetic models", len(rows), "rows") as bar,
    ):
        run = pool.map if options.processes > 1 else map
        for row in run(partial(complete, options), rows):
            done.append(row)
            bar.advance()
            yield row
    show(options, done)


def read_rows(path: Path | None) -> dict[tuple[object, ...], Row]:
    """The results in the file of an earlier run, by facts."""
    if path is None or not path.is_file():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {tuple(row[name] for name in FACTS): row["results"] for row in rows}


def complete(options: Options, row: Row) -> Row:
    """The row with the results that it lacks."""
    torch.set_num_threads(1)
    layers, groups = map(int, row["size"].split("x"))
    published = row["family"] == "published"
    spec = Spec(
        layers,
        groups,
        row["family"],
        row["pairs"],
        row["seed"],
        patterns=options.patterns if published else None,
    )
    model = SyntheticModel(spec)
    for method in options.methods:
        if method in row["results"] or (method == BEST and row["seed"] >= options.best_seeds):
            continue
        began = time.process_time()
        result = search_best(options, model, row) if method == BEST else search(model, method, row)
        z = result.pop("z")
        for name, held_out in (("calibration", False), ("held_out", True)):
            means = model.score(z, held_out)
            value = weighted(OBJECTIVE, *means)
            scores = means._asdict() | {"value": value}
            result[name] = {name: round(score, 5) for name, score in scores.items()}
        result["cpu_seconds"] = round(time.process_time() - began, 2)
        row["results"][method] = result
    return row | {
        "name": "{size}, {family}, pairs {pairs}, ratio {ratio}, seed {seed}".format(**row),
        "value": 100 * row["results"][options.compared]["held_out"]["accuracy"],
        "unit": f"% of held-out questions right by {options.compared}",
    }


def search(model: SyntheticModel, method: str, row: Row) -> Row:
    name, *words = method.split(",")
    settings = default_settings(name, MaskConfig(kappa=row["kappa"]))
    if getattr(settings, "optimizer", None) == "nomad":
        settings = replace(settings, optimizer=row["optimizer"])
    settings = with_options(name, settings, words, f"--methods {method}:")
    with tempfile.TemporaryDirectory() as folder:
        inputs = inputs_of(model, settings, row["ratio"], row["seed"], Path(folder))
        selection = choose(name, inputs, quiet=True)
    trace, cost = selection.score_trace or {}, selection.cost or {}
    return {
        "z": selection.mask.z,
        "evaluations": trace.get("evaluations"),
        "layer_forwards": cost.get("layer_forwards"),
    }


def search_best(options: Options, model: SyntheticModel, row: Row) -> Row:
    """Swaps that start from the true importances."""
    size = model.num_layers * model.num_groups
    quota = num_windowed(row["ratio"], model.num_layers, model.num_groups)

    def evaluate(assignment: Assignment, threshold: float | None) -> Value:
        means = model.score(model.mask(assignment))
        return Value(rounded(weighted(OBJECTIVE, *means)), True, *means)

    start = model.best_guess(quota)
    problem = Problem(size, quota, evaluate, options.best_evaluations, starts=(start,))
    solution = optimize("swap", problem)
    return {
        "z": model.mask(solution.assignment),
        "evaluations": len(solution.trials.table),
        "layer_forwards": None,
    }


# --------------------------------------------------------------------------------------- the tables


def show(options: Options, rows: Sequence[Row]) -> None:
    """Tables of means over the models, and of paired differences to the baseline."""
    for size, family, pairs in product(options.sizes, options.families, options.pairs):
        chosen = [
            row
            for row in rows
            if (row["size"], row["family"], row["pairs"]) == (size, family, pairs)
        ]
        kind = f"{size}, {family}, {'with' if pairs else 'no'} pairs"
        show_part(f"{kind}: held-out {options.shown}", options, chosen, None)
        show_part(f"{kind}: less {options.compared}", options, chosen, options.compared)
    title = f"all: held-out {options.shown} less {options.compared}"
    show_part(title, options, rows, options.compared)


def show_part(title: str, options: Options, rows: Sequence[Row], baseline: str | None) -> None:
    """A line for each method, a column for each ratio: mean and standard error."""
    lines = []
    for method in options.methods:
        if method == baseline:
            continue
        both = [row for row in rows if method in row["results"]]
        cells: list[object] = [method]
        for ratio in options.ratios:
            scores = [
                held_out(options, row, method)
                - (held_out(options, row, baseline) if baseline else 0)
                for row in both
                if row["ratio"] == ratio
            ]
            cells.append(mean_and_error(scores))
        for name in () if baseline else COSTS.values():
            found = [row["results"][method][name] for row in both]
            cells.append(None if None in found or not found else f"{statistics.fmean(found):,.1f}")
        lines.append(cells)
    heads = ["method", *map(str, options.ratios), *(() if baseline else COSTS)]
    show_table(title, heads, lines)


def held_out(options: Options, row: Row, method: str) -> float:
    score: float = row["results"][method]["held_out"][options.shown]
    return score * SCALES[options.shown]


def mean_and_error(scores: Sequence[float]) -> str | None:
    if not scores:
        return None
    error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else float("nan")
    return f"{statistics.fmean(scores):.2f} ± {error:.2f}"
