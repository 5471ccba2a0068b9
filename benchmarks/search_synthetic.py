"""Compare mask searches on synthetic models: held-out answers, evaluations and layer-forwards.

    python -m benchmarks search_synthetic --methods bosch global_swap,kappa=60 best --out rows.json

A method is a name of bosch/methods, followed by its settings. Methods that rank
groups by attention weights get the same kind of noisy ranking; `best` is a swap search that starts
from the true importances, takes --best-evaluations and sees every value exactly. Rows that the file
--out holds are not made again. benchmarks/_synthetic.py describes the models.
"""

import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

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
from bosch.search.objective import Value, Z, rounded, weighted
from bosch.search.optimizers._interface import Assignment, Problem, optimize

BEST = "best"
OBJECTIVE = "accuracy+probability"  # of `best`, and of `value` in the rows
FACTS = ("size", "family", "pairs", "ratio", "seed", "method", "kappa", "optimizer")
Facts = tuple[Any, ...]  # what a row is about: the values of these fields
COSTS = {
    "evaluations": "evaluations",
    "layer-forwards": "layer_forwards",
    "CPU s": "cpu_seconds",
}


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    # Searches to compare; the first is the baseline.
    methods: tuple[str, ...] = (
        "bosch",
        "bosch_paper",
        "bosch_single",
        "bosch_multi",
        "bosch_layer",
        "global_swap",
        "fisher",
        "single_group",
        "random_groups",
        BEST,
    )
    sizes: tuple[str, ...] = ("8x8",)  # layers x groups
    families: tuple[str, ...] = ("even", "heavy")  # even, heavy, published
    patterns: Path | None = None  # of the family `published`: a table of numbers, layers x heads
    pairs: tuple[bool, ...] = (False, True)  # without and with groups that stand in for each other
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75, 0.875)  # ratios to search masks for
    seeds: int = 20  # models of each kind, and seeds of the searches
    kappa: int = 30  # masks tried per layer
    # In place of NOMAD, whose processes take many times as long as all else here. `nomad`: NOMAD.
    optimizer: str = "one_plus_one"
    best_evaluations: int = 20_000  # of `best`
    best_seeds: int = 5  # models for which `best` is searched
    processes: int = 1  # searches at once

    def __post_init__(self) -> None:
        for family in self.families:
            if family not in FAMILIES:
                raise UserError(f"--families {family}: {suggest(family, FAMILIES)}")
        if "published" in self.families and not (self.patterns and self.patterns.is_file()):
            raise MissingFileError(
                f"--patterns {self.patterns}: the family `published` needs a file of head scores."
            )


def measure(options: Options) -> Iterator[list[Row]]:
    """One row for each model, ratio and method; first those that the file has."""
    known = {facts_of(row): row for row in read_rows(options.out)}
    yield list(known.values())
    wanted = list(facts_wanted(options))
    missing = [facts for facts in wanted if facts not in known]
    with (
        ProcessPoolExecutor(options.processes, get_context("spawn")) as pool,
        track("searches", len(wanted), "searches", done=len(wanted) - len(missing)) as bar,
    ):
        run = pool.map if options.processes > 1 else map
        for row in run(partial(make_row, options), missing):
            known[facts_of(row)] = row
            bar.advance()
            yield [row]
    show(options, [known[facts] for facts in wanted])


def facts_wanted(options: Options) -> Iterator[Facts]:
    """Seed by seed: a run that is stopped has some of everything."""
    for seed in range(options.seeds):
        for size, family, pairs, ratio, method in product(
            options.sizes, options.families, options.pairs, options.ratios, options.methods
        ):
            if method != BEST:
                yield size, family, pairs, ratio, seed, method, options.kappa, options.optimizer
            elif seed < options.best_seeds:
                yield size, family, pairs, ratio, seed, method, options.best_evaluations, "swap"


def facts_of(row: Row) -> Facts:
    return tuple(row[name] for name in FACTS)


def read_rows(path: Path | None) -> list[Row]:
    """The rows of an earlier run."""
    rows: list[Row] = json.loads(path.read_text())["rows"] if path and path.is_file() else []
    return rows


def make_row(options: Options, facts: Facts) -> Row:
    torch.set_num_threads(1)
    row: Row = dict(zip(FACTS, facts, strict=True))
    layers, groups = map(int, row["size"].split("x"))
    patterns = options.patterns if row["family"] == "published" else None
    model = SyntheticModel(
        Spec(layers, groups, row["family"], row["pairs"], row["seed"], patterns=patterns)
    )
    began = time.process_time()
    z, costs = (search_best if row["method"] == BEST else search)(model, row)
    row |= costs | {"cpu_seconds": round(time.process_time() - began, 2)}
    for name, held_out in (("calibration", False), ("held_out", True)):
        means = model.score(z, held_out)
        scores = means._asdict() | {"value": weighted(OBJECTIVE, *means)}
        row[name] = {name: round(score, 5) for name, score in scores.items()}
    title = "{method}, {size}, {family}, pairs {pairs}, ratio {ratio}, seed {seed}".format(**row)
    value = 100 * row["held_out"]["accuracy"]
    return {"name": title, "value": value, "unit": "% of held-out questions right"} | row


def search(model: SyntheticModel, row: Row) -> tuple[Z, Row]:
    name, *words = row["method"].split(",")
    settings = default_settings(name, MaskConfig(kappa=row["kappa"]))
    if getattr(settings, "optimizer", None) == "nomad":
        settings = replace(settings, optimizer=row["optimizer"])
    settings = with_options(name, settings, words, f"--methods {row['method']}:")
    with tempfile.TemporaryDirectory() as folder:
        inputs = inputs_of(model, settings, row["ratio"], row["seed"], Path(folder))
        selection = choose(name, inputs, quiet=True)
    evaluations = (selection.score_trace or {}).get("evaluations")
    work = (selection.cost or {}).get("layer_forwards")
    return selection.mask.z, {"evaluations": evaluations, "layer_forwards": work}


def search_best(model: SyntheticModel, row: Row) -> tuple[Z, Row]:
    """Swaps that start from the true importances."""
    size = model.num_layers * model.num_groups
    quota = num_windowed(row["ratio"], model.num_layers, model.num_groups)

    def evaluate(assignments: Sequence[Assignment], threshold: float | None) -> list[Value]:
        scores = [model.score(model.mask(assignment)) for assignment in assignments]
        return [Value(rounded(weighted(OBJECTIVE, *means)), True, *means) for means in scores]

    starts = (model.best_guess(quota),)
    solution = optimize("swap", Problem(size, quota, evaluate, row["kappa"], starts=starts))
    costs = {"evaluations": len(solution.trials.table), "layer_forwards": None}
    return model.mask(solution.assignment), costs


# --------------------------------------------------------------------------------------- the tables


def show(options: Options, rows: Sequence[Row]) -> None:
    """Tables of means over the models, and of paired differences to the baseline."""
    kinds = list(product(options.sizes, options.families, options.pairs))
    for kind in kinds:
        chosen = [row for row in rows if facts_of(row)[:3] == kind]
        show_part(f"{kind[0]}, {kind[1]}, {'with' if kind[2] else 'no'} pairs", options, chosen)
    if len(kinds) > 1:
        show_part("all models", options, rows)


def show_part(title: str, options: Options, rows: Sequence[Row]) -> None:
    """A line for each method, a column for each ratio: mean and standard error."""
    scores: dict[str, dict[Facts, float]] = {method: {} for method in options.methods}
    for row in rows:
        scores[row["method"]][facts_of(row)[:5]] = row["value"]
    first, means, differences = options.methods[0], [], []
    for method, own in scores.items():
        known = scores[first]
        less = {facts: score - known[facts] for facts, score in own.items() if facts in known}
        means.append([method, *_by_ratio(options, own)])
        if method != first:
            differences.append([method, *_by_ratio(options, less)])
        for name in COSTS.values():
            costs = [row[name] for row in rows if row["method"] == method]
            is_known = costs and None not in costs
            means[-1].append(f"{statistics.fmean(costs):,.1f}" if is_known else None)
    ratios = list(map(str, options.ratios))
    show_table(f"{title}: held-out answers right, %", ["method", *ratios, *COSTS], means)
    show_table(f"{title}: less {first}", ["method", *ratios], differences)


def _by_ratio(options: Options, scores: Mapping[Facts, float]) -> list[str | None]:
    """Mean and standard error at each ratio."""
    cells: list[str | None] = []
    for ratio in options.ratios:
        some = [score for facts, score in scores.items() if facts[3] == ratio]
        error = statistics.stdev(some) / len(some) ** 0.5 if len(some) > 1 else math.nan
        cells.append(f"{statistics.fmean(some):.2f} ± {error:.2f}" if some else None)
    return cells
