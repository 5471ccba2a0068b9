"""Every method on one model: NIAH of its masks, mean and standard error over calibration sets, and
the time each took to choose them.

Each method runs the stages of recover.py up to the model, once for each seed: the seed makes the
calibration set, and is the method's own. Then the hybrid is judged as it is, untrained. Runs are
kept in a folder, so that the same command goes on where it stopped, and those that the study has
packed are not made again; `--table` writes the page docs/methods.md from all of them.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bosch.config import Config
from bosch.manifest import MANIFEST, provenance, write_atomically
from bosch.mask import describe_ratio, read_mask
from bosch.model_folder import read_model_info
from bosch.plugins import describe_plugin, list_plugins
from bosch.progress import say
from bosch.run_folder import RunFolder
from eval.results import collect_results
from eval.settings import Label
from recipes import calibrate, evaluate_model, materialize_model, presets, search_mask, study
from recipes.benchmarks._options import BenchmarkOptions

SHOWS_TABLE = True  # so that benchmark.py prints only the rows with a target
METHODS = "bosch.methods"
METRIC = "string_match_all"
DENSE, WINDOWED = "full attention", "everything windowed"
REFERENCES = (DENSE, WINDOWED)
COMMAND = "python recipes/benchmark.py methods"


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: str = presets.TINY_MODEL
    """A shipped model, a folder or a hub id; settings are those of the preset `tiny` for the first,
    of `paper` scaled to the model for others."""
    ratio: float = 0.75
    methods: tuple[str, ...] = ()
    """None: all that need nothing but a calibration set."""
    seeds: int = 3
    """Calibration sets, each with another seed."""
    samples: int = 20
    """Test examples of each task and length."""
    lengths: tuple[int, ...] = ()
    """Of NIAH; None: the setup's."""
    runs: Path = Path("runs/methods")
    """Where the runs are kept."""
    archive: Path = Path("benchmarks/study")
    """Packed runs of `make study`."""
    table: Path | None = None
    """Page to write, docs/methods.md for the one of this repository."""

    def __post_init__(self) -> None:
        for name in ("seeds", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}, it must be at least 1.")
        for name in self.methods:
            presets.check_method(name)


def measure(options: Options) -> list[dict[str, Any]]:
    names, left_out = choose_methods(options)
    for name, reason in left_out.items():
        say(f"{name} is left out: {reason}")
    rows = [judge_dense(options), judge_runs(WINDOWED, [windowed_config(options)], options)]
    for name in names:
        configs = [config_of(options, name, seed) for seed in range(options.seeds)]
        rows.append(judge_runs(name, configs, options))
    for line in describe_table(rows):
        say(line)
    if options.table:
        write_page(options.table, rows, left_out, options)
        say(f"wrote {options.table}")
    return rows


def choose_methods(options: Options) -> tuple[list[str], dict[str, str]]:
    """The methods to run, and why each of the others is not."""
    from bosch.methods import _choose

    left_out = {}
    for name in options.methods or list_plugins(METHODS):
        config = config_of(options, name, seed=0)
        if _choose.learns_from_tokens(name):
            configs = [config_of(options, name, seed) for seed in range(options.seeds)]
            if not all(is_archived(config, options) for config in configs):
                left_out[name] = (
                    "it learns from tokens, so its masks cost training; the study runs it"
                )
            continue
        try:
            _choose.check_settings(name, search_mask.default_settings(name, config.mask))
        except (ValueError, FileNotFoundError) as error:
            left_out[name] = str(error)
    known = options.methods or list_plugins(METHODS)
    return [name for name in known if name not in left_out], left_out


# ----------------------------------------------------------------------------------------- the runs


def config_of(options: Options, method: str, seed: int) -> Config:
    shipped = presets.find_model(options.model) and not Path(options.model).is_dir()
    make = presets.tiny if shipped else presets.scaled_paper
    config = replace(make(options.model), method=method, ratio=options.ratio, seed=seed)
    lengths = options.lengths or config.eval.niah_lengths
    judging = replace(config.eval, niah_samples=options.samples, niah_lengths=lengths)
    return replace(config, eval=judging)


def windowed_config(options: Options) -> Config:
    return replace(config_of(options, "interleave", seed=0), ratio=1.0)


def judge_dense(options: Options) -> dict[str, Any]:
    config = config_of(options, "interleave", seed=0)
    name = f"{Path(options.model).name}-dense"
    scores = judge(options.runs / name, options.model, config, Label(name), options)
    return summarize(DENSE, [scores], [])


def judge_runs(name: str, configs: Sequence[Config], options: Options) -> dict[str, Any]:
    """The row of one method: a run for each config."""
    scores, masks = [], []
    for config in configs:
        run_name = f"{Path(config.model).name}-{config.method}-r{config.ratio:g}-s{config.seed}"
        path = unpack_archived(config, options)
        if path is None:
            path = options.runs / run_name
            with RunFolder(path, say=say) as run:
                for stage in chain_of(config):
                    artifact = run.complete(stage)
            label = Label(run_name, step=0, tokens=0)
            scores.append(judge(path, str(artifact.folder), config, label, options))
        else:
            rows = collect_results(path / "eval", run_name)
            scores.append([row for row in rows if (row["step"], row["metric"]) == (0, METRIC)])
        masks.append(path / "mask")
    return summarize(name, scores, masks)


def chain_in_study(config: Config) -> study.Chain:
    return study.Chain(config.method, config.ratio, config.seed, trained=False)


def packed_in_study(config: Config, options: Options) -> study.Options | None:
    """The options of a study that may have a run with these settings."""
    if config.model != presets.TINY_MODEL or options.lengths:
        return None
    return study.Options(samples=options.samples, archive=options.archive)


def is_archived(config: Config, options: Options) -> bool:
    packed = packed_in_study(config, options)
    return packed is not None and study.is_archived(chain_in_study(config), packed)


def unpack_archived(config: Config, options: Options) -> Path | None:
    """The folder of a run that the study has packed."""
    if (packed := packed_in_study(config, options)) is None:
        return None
    return study.unpack_archived(chain_in_study(config), packed, options.runs / "packed")


def chain_of(config: Config) -> Iterator[Any]:
    mask = search_mask.build(config, calibrate.build(config))
    yield from mask.inputs.values()  # the calibration set, for methods that read it
    yield mask
    yield materialize_model.build(config, mask)


def judge(
    run_path: Path, model: str, config: Config, label: Label, options: Options
) -> list[dict[str, Any]]:
    """Rows of NIAH, predicted and judged in the run's folder `eval`."""
    positions = presets.read_shape(config.model).positions
    judging = evaluate_model.judging_of(config, positions)
    niah = tuple(suite for suite in judging.suites if suite.name == "niah")
    shared = options.runs / "shared"
    stage = evaluate_model.make_stage("niah", model, replace(judging, suites=niah), label, shared)
    with RunFolder(run_path / "eval", say=say) as run:
        run.complete(stage)
    rows = collect_results(run_path / "eval", run_path.name)  # analyze_masks.py reads them there
    return [row for row in rows if row["metric"] == METRIC]


# ---------------------------------------------------------------------------------------- the rows


def summarize(
    name: str, scores: Sequence[list[dict[str, Any]]], masks: Sequence[Path]
) -> dict[str, Any]:
    """One row: mean over the runs, and what stands behind it."""
    averages = [find(rows, "average", 0) for rows in scores]
    values = [row["value"] for row in averages]
    groups: dict[str, float] = {}
    for row in scores[0]:
        if row["task"] in ("single", "multikey"):
            told = [find(rows, row["task"], row["length"])["value"] for rows in scores]
            groups[f"{row['task']} {row['length']}"] = mean(told)
    seconds = [sum(json.loads((mask / MANIFEST).read_text())["wall_seconds"]) for mask in masks]
    files = [read_mask(mask / "mask.json") for mask in masks]
    return {
        "name": name,
        "value": mean(values),
        "unit": "%",
        "values": values,
        "stderr_of_seeds": stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
        "stderr_of_examples": mean(row["stderr"] or 0.0 for row in averages),
        "examples": averages[0]["n"],
        "groups": groups,
        "seconds": seconds if name not in REFERENCES else [],
        "masks": len({file.mask for file in files}),
    }


def find(rows: Sequence[dict[str, Any]], task: str, length: int) -> dict[str, Any]:
    for row in rows:
        if (row["task"], row["length"]) == (task, length):
            return row
    raise ValueError(
        f"NIAH has no {task} at these lengths: some task cannot be built there; ask for longer "
        "--lengths."
    )


def describe_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table in Markdown, the best method first, between the two references."""
    dense, windowed = rows[:2]
    ranked = sorted(rows[2:], key=lambda row: -row["value"])
    groups = list(dense["groups"])
    header = ["method", "NIAH", "± sets", "± examples", *groups, "masks", "seconds"]
    lines = [f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
    for row in [dense, *ranked, windowed]:
        spread = row["stderr_of_seeds"]
        cells = [
            row["name"],
            f"{row['value']:.1f}",
            "" if spread is None else f"{spread:.1f}",
            f"{row['stderr_of_examples']:.1f}",
            *(f"{row['groups'][group]:.1f}" for group in groups),
            str(row["masks"]) if row["seconds"] else "",
            f"{mean(row['seconds']):.1f}" if row["seconds"] else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_page(
    path: Path, rows: Sequence[dict[str, Any]], left_out: dict[str, str], options: Options
) -> None:
    """docs/methods.md: what was measured, and one sentence on each method."""
    from recipes.benchmark import describe_machine

    config = config_of(options, "interleave", seed=0)
    layers, groups = presets.read_shape(options.model).groups
    model = read_model_info(materialize_model.fetch_model(options.model))
    machine = describe_machine()
    versions = provenance()["packages"]
    questions = config.calibration
    told = [
        f"Made by `{COMMAND} --table {path}`; do not edit it by hand.",
        "",
        f"Model {model}, {layers} layers x {groups} groups, window {config.window}. "
        f"{describe_ratio(options.ratio, layers, groups)}. Each method chose its masks on "
        f"{options.seeds} calibration sets of {questions.examples} questions in contexts of "
        f"{questions.length:,} tokens; the hybrids were judged untrained on {rows[0]['examples']} "
        f"NIAH examples of {', '.join(map(str, config.eval.niah_lengths))} tokens, "
        f"{options.samples} a task and length, the same for all.",
        "",
        "- NIAH: mean of the groups single and multikey at each length, in per cent",
        "- ± sets: standard error over the calibration sets; ± examples: that of one mask's score "
        "over the test examples",
        "- masks: how many of the masks differ; seconds: of the stage that chooses one, learning "
        "from tokens included where a method does; masks that another search on the same set has "
        "scored are not scored again (most of bosch_single's are bosch's). On "
        f"{machine['device']}, {machine['cores']} cores, torch {versions.get('torch', '?')}",
        "",
        *describe_table(rows),
        "",
        "| method | what it does |",
        "|---|---|",
        *(f"| {n} | {describe_plugin(METHODS, n)} |" for n in list_plugins(METHODS)),
        "",
    ]
    told += [f"- {name} is not in the table: {reason}" for name, reason in left_out.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join(["# Methods side by side", "", *told]) + "\n")
