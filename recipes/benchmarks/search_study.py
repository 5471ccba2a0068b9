"""The searches on held-out tests, at equal kappa, over calibration sets; and what a reviewer
would ask of the stages.

Each search gets calibration sets of different seeds, and its masks are judged on the same examples
of the test split: NIAH and toy LongBench, right where every answer token is the arg-max. A row is
kept for each mask, so that the same command goes on where it stopped, another day too. A mask that
a run of recipes/study.py has found with the same settings is taken from its archive.
`search_page` writes docs/search.md from them.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from bosch.config import Config
from bosch.mask import read_mask
from bosch.model_folder import read_model_info
from bosch.progress import say
from bosch.search.evaluations import MaskObjective
from bosch.search.journal import rows_of, texts_of
from bosch.search.objective import Rows
from bosch.search.scorer import CPU_MEMORY_GB, Scorer
from recipes import measure_tiny, presets, search_mask, study
from recipes.benchmarks._options import BenchmarkOptions
from recipes.benchmarks._search import (
    Setup,
    add_row,
    average,
    grouped,
    read_rows,
    search,
    set_up,
    stderr,
)
from recipes.materialize_model import fetch_model

SEARCHES = (
    "bosch",
    "bosch_plus",
    "global_swap",
    "bosch_single",
    "bosch_multi",
    "bosch_layer",
    "random_groups",
)
# Of a search.
TRACED = ("dense", "stage1_scores", "whole_layer_log_probabilities", "ratios", "last_stage")
JUDGED = ("mean", "niah", "tasks", "log_probability")  # on the tests
SPENT = ("evaluations", "layer_forwards", "seconds")
PARTS = ("masks", "layers", "groups", "kappas")
Row = dict[str, Any]
Mask = tuple[Rows, Mapping[str, Any], Mapping[str, Any]]  # its trace and its cost


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: str = presets.TINY_MODEL
    searches: tuple[str, ...] = SEARCHES
    ratios: tuple[float, ...] = (0.75, 0.5)
    seeds: int = 5
    """Calibration sets."""
    kappa: int = 30
    """Evaluations a layer."""
    examples: int = 48
    """Calibration questions, four in a context."""
    length: int = 1024
    """Of contexts, for calibration and of NIAH."""
    samples: int = 10
    """Test examples of each task."""
    parts: tuple[str, ...] = PARTS
    """masks: the comparison. layers: each layer wholly on the window, on the tests. groups: each
    group alone, in the full model and in the hybrid. kappas: bosch and bosch_plus at more than one
    kappa."""
    kappas: tuple[int, ...] = (10, 30, 100, 300)
    kappa_seeds: int = 3
    max_minutes: float | None = None
    """Begin nothing more after so long; the next run goes on."""
    rows: Path = Path("benchmarks/search-study.jsonl")
    """A line for each mask."""
    runs: Path = Path("runs/search")
    """Where calibration sets are kept."""
    archive: Path = study.Options.archive
    """Packed runs of the study."""

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"--parts {part}: it must be one of {', '.join(PARTS)}.")


def measure(options: Options) -> list[Row]:
    torch.set_num_threads(1)
    study = Study(options)
    done = {row["name"] for row in study.rows()}
    began = time.monotonic()
    for name, make in study.plan():
        if options.max_minutes and time.monotonic() - began > 60 * options.max_minutes:
            say(f"--max-minutes {options.max_minutes:g} are over; the same command goes on")
            break
        if name not in done:
            add_row(options.rows, {"name": name, "about": study.about, **make()})
            done.add(name)  # the plan has some twice
            say(f"{name}: done")
    return summarize(study.rows())


def about_of(options: Options) -> Row:
    """What every row must share to stand in one table."""
    info = read_model_info(fetch_model(options.model))
    names = ("examples", "length", "samples")
    return {"model": info.weight_hash} | {name: getattr(options, name) for name in names}


class Study:
    """What there is to measure, and how each is."""

    def __init__(self, options: Options) -> None:
        self.options, self.about = options, about_of(options)
        self.num_layers, self.num_groups = presets.read_shape(options.model).groups
        self.dense: Rows = ((1,) * self.num_groups,) * self.num_layers
        self._setups: dict[int, Setup] = {}

    def rows(self) -> list[Row]:
        return [row for row in read_rows(self.options.rows) if row["about"] == self.about]

    def plan(self) -> Iterator[tuple[str, Callable[[], Row]]]:
        """Names and makers of all rows: those of one seed before those of the next."""
        options = self.options
        if "masks" in options.parts:
            windowed: Rows = ((0,) * self.num_groups,) * self.num_layers
            for name, z in (("dense", self.dense), ("windowed", windowed)):
                yield name, partial(self.judge_end, name, z)
            for seed, ratio, method in product(
                range(options.seeds), options.ratios, options.searches
            ):
                yield self.plan_mask(method, ratio, options.kappa, seed)
        if "layers" in options.parts:
            for layer in range(self.num_layers):
                yield f"layer {layer}", partial(self.judge_layer, layer)
        if "groups" in options.parts:
            for ratio in options.ratios:
                yield f"groups at {ratio:g}", partial(self.measure_groups, ratio)
        if "kappas" in options.parts:
            for kappa, seed, method in product(
                options.kappas, range(options.kappa_seeds), ("bosch", "bosch_plus")
            ):
                yield self.plan_mask(method, options.ratios[0], kappa, seed)

    def plan_mask(
        self, method: str, ratio: float, kappa: int, seed: int
    ) -> tuple[str, Callable[[], Row]]:
        name = f"{method} at {ratio:g}, kappa {kappa}, seed {seed}"
        return name, partial(self.search_and_judge, method, ratio, kappa, seed)

    # ------------------------------------------------------------------------------- each row

    def search_and_judge(self, method: str, ratio: float, kappa: int, seed: int) -> Row:
        found = find_archived(self.options, method, ratio, kappa, seed)
        z, trace, cost = found or self.search(method, ratio, kappa, seed)
        return {
            "kind": "mask",
            "search": method,
            "ratio": ratio,
            "kappa": kappa,
            "seed": seed,
            "evaluations": trace.get("evaluations", 0),
            "layer_forwards": round(cost.get("layer_forwards", 0)),
            "seconds": round(cost.get("seconds", 0), 1),
            "calibration": trace.get("hybrid"),
            **{name: trace[name] for name in TRACED if name in trace},
            **self.judge(z),
        }

    def search(self, method: str, ratio: float, kappa: int, seed: int) -> Mask:
        settings: Row = {"kappa": kappa} if method != "random_groups" else {}
        # In a folder of its own, so that a killed search goes on from its journal.
        own = f"{method}-{ratio:g}-{kappa}-{seed}-{self.about['model'][:12]}"
        folder = self.options.runs / "study" / own
        folder.mkdir(parents=True, exist_ok=True)
        found = search(self.setup_of(seed), method, ratio, seed, folder, **settings)
        shutil.rmtree(folder)
        return found.selection.mask.z, found.trace, found.selection.cost or {}

    def judge_end(self, name: str, z: Rows) -> Row:
        return {"kind": "end", "search": name, **self.judge(z)}

    def judge_layer(self, layer: int) -> Row:
        z = tuple(tuple(int(i != layer) for _ in row) for i, row in enumerate(self.dense))
        return {"kind": "layer", "layer": layer, **self.judge(z)}

    def measure_groups(self, ratio: float) -> Row:
        """Mean log-probability on the calibration set of seed 0, that each group's full attention
        adds: in the full model, and in the hybrid of bosch_plus, with one group more or less.
        """
        setup = self.setup_of(0)
        kappa = self.options.kappa
        name, make = self.plan_mask("bosch_plus", ratio, kappa, 0)
        known = {row["name"]: row for row in self.rows()}
        hybrid = rows_of((known.get(name) or make())["z"])
        objective = MaskObjective(
            Scorer(setup.model, setup.calibration, setup.config.window),
            setup.calibration,
            "logprob",
        )

        def added(z: Rows) -> list[float]:
            """By each group, top layer first: what lies below is computed once."""
            found = {}
            places = product(reversed(range(self.num_layers)), range(self.num_groups))
            for layer, group in places:
                with_it, without = (put(z, layer, group, bit) for bit in (1, 0))
                found[layer, group] = objective(with_it).value - objective(without).value
            return [round(found[place], 4) for place in sorted(found)]

        return {
            "kind": "groups",
            "ratio": ratio,
            "z": texts_of(hybrid),
            "full": added(self.dense),
            "hybrid": added(hybrid),
        }

    def judge(self, z: Rows) -> Row:
        found = measure_tiny.summary(self.tests, self.outcomes_of(z))
        names = ("mean", "niah", "tasks", "log_probability")
        return {"z": texts_of(z), **{name: round(found[name], 3) for name in names}}

    # ------------------------------------------------------------------------------- what it needs

    @cached_property
    def model(self) -> PreTrainedModel:
        return search_mask.load_model(fetch_model(self.options.model))

    def setup_of(self, seed: int) -> Setup:
        if seed not in self._setups:
            config = config_of(self.options, seed)
            self._setups[seed] = set_up(config, self.options.runs, self.model)
        return self._setups[seed]

    @cached_property
    def outcomes_of(self) -> Callable[[Rows], list[measure_tiny.Outcome]]:
        window = self.setup_of(0).config.window
        return measure_tiny.judge_of(self.model, self.tests, window, CPU_MEMORY_GB)

    @cached_property
    def tests(self) -> list[measure_tiny.Example]:
        tokenizer: Any = AutoTokenizer.from_pretrained(fetch_model(self.options.model))
        options = self.options
        needles = measure_tiny.needle_examples(
            tokenizer, options.length, options.samples, "test", seed=0
        )
        return needles + measure_tiny.task_examples(tokenizer, options.samples, "test", seed=0)


def config_of(options: Options, seed: int) -> Config:
    config = replace(presets.tiny(options.model), seed=seed)
    calibration = replace(config.calibration, examples=options.examples, length=options.length)
    return replace(config, calibration=calibration, mask=replace(config.mask, kappa=options.kappa))


def find_archived(
    options: Options, method: str, ratio: float, kappa: int, seed: int
) -> Mask | None:
    """The mask of a run of the study, if that had these settings."""
    config, preset = config_of(options, seed), presets.tiny(options.model)
    asked = config.calibration, replace(config.mask, kappa=kappa)
    chain = study.Chain(method, ratio, seed, trained=False)
    packed = study.Options(archive=options.archive)
    if options.model != presets.TINY_MODEL or asked != (preset.calibration, preset.mask):
        return None
    folder = study.unpack_archived(chain, packed, options.runs / "packed")
    if folder is None:
        return None
    mask = read_mask(folder / "mask" / "mask.json")
    cost = json.loads((folder / "mask" / "time.json").read_text("utf-8"))
    return mask.mask.z, mask.score_trace or {}, cost


def put(z: Rows, layer: int, group: int, bit: int) -> Rows:
    rows = [list(row) for row in z]
    rows[layer][group] = bit
    return tuple(map(tuple, rows))


# ---------------------------------------------------------------------------------- what came out


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Mean and standard error over the calibration sets, for each search, ratio and kappa."""
    summary: list[Row] = []
    masks = [row for row in rows if row["kind"] == "mask"]
    for (method, ratio, kappa), runs in grouped(masks, "search", "ratio", "kappa"):
        summary.append(
            {
                "name": f"{method} at {ratio:g}, kappa {kappa}",
                "value": average(runs, "mean"),
                "unit": "% right",
                "search": method,
                "ratio": ratio,
                "kappa": kappa,
                "seeds": len(runs),
                **{f"{name}_stderr": stderr(row[name] for row in runs) for name in JUDGED},
                **{name: average(runs, name) for name in (*JUDGED, *SPENT)},
            }
        )
    return summary
