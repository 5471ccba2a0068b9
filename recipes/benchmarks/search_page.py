"""Writes docs/search.md from what the benchmarks `search`, `search_truth` and `search_study` have
left in benchmarks/; nothing is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from bosch.manifest import write_atomically
from bosch.mask import num_windowed
from bosch.progress import say
from recipes.benchmarks import search, search_study, search_truth
from recipes.benchmarks._options import BenchmarkOptions
from recipes.benchmarks._search import average, grouped, read_rows, show_mean, table
from recipes.benchmarks._search_questions import ask_all
from recipes.benchmarks.search_study import Study

COMMAND = "python recipes/benchmark.py"
Row = dict[str, Any]


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    page: Path = Path("docs/search.md")
    speed: Path = search.Options.rows
    truth_values: Path = search_truth.Options.values
    truth_rows: Path = search_truth.Options.rows
    study: Path = search_study.Options.rows


def measure(options: Options) -> list[Row]:
    lines = [
        "# The search: what it costs and what it finds",
        "",
        f"Made by `{COMMAND} search_page` from the files named below; do not edit it by hand. The "
        "models are the embedded ones, on a CPU; what holds for them need not hold for large ones.",
        "",
        *describe_speed(options.speed),
        *describe_truth(options),
        *describe_study(Study(search_study.Options(rows=options.study))),
    ]
    options.page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.page, "\n".join(lines).rstrip() + "\n")
    say(f"wrote {options.page}")
    return []


# ---------------------------------------------------------------------------------- accelerations


def describe_speed(path: Path) -> list[str]:
    told = ["## Accelerations", ""]
    rows = read_rows(path)
    if not rows:
        return [*told, f"Not measured: {path} is not there.", ""]
    rows = [row for row in rows if row["about"] == rows[-1]["about"]]
    compared = [row for row in rows if row["unit"] == "x" and "switch" not in row]
    switched = [row for row in rows if "switch" in row]
    first = (compared or rows)[0]
    told += [
        f"{path}, `{COMMAND} search`: the tiny model, {first['questions']} questions in "
        f"{first['texts']} contexts of {first['length']} tokens, kappa {first['kappa']}, "
        f"{first['device']}. Every pair of searches ended in the same mask. Seconds are CPU time "
        "of the searching process; static rankings to start from, which no acceleration touches, "
        "and NOMAD, which has a process of its own, are not in them. `swap` is `global_swap` from "
        "the best of the rankings.",
        "",
    ]
    lines = []
    for (name, ratio), (work, seconds) in grouped(compared, "search", "ratio"):
        lines.append(
            (
                name,
                f"{ratio:g}",
                work["evaluations"],
                f"{work['none']:,.0f}",
                f"{work['all']:,.0f}",
                f"{work['value']:.1f}x",
                f"{seconds['none']:.0f}",
                f"{seconds['all']:.0f}",
                f"{seconds['value']:.1f}x",
                f"{work['at_least']:g}x" if "at_least" in work else None,
            )
        )
    header = ("search", "ratio", "evaluations", "layer-forwards, none", "all", "less")
    told += table((*header, "seconds, none", "all", "less", "target"), lines) if lines else []
    for row in rows:
        if row["unit"] == "s":
            told += [
                f"{row['name']} ({row['questions']} questions, kappa {row['kappa']}): "
                f"{row['evaluations']} evaluations, {row['layer_forwards']:,.0f} layer-forwards, "
                f"{row['value']:.0f} s of CPU time.",
                "",
            ]
    if switched:
        one = switched[0]
        told += [f"Off one at a time, {one['search']} at {one['ratio']:g}:", ""]
        told += table(
            ("without", "layer-forwards", "times those with all", "seconds, times"),
            [
                (
                    f"`{row['switch']}`",
                    f"{row['none']:,.0f}",
                    f"{row['value']:.2f}",
                    f"{row['seconds_ratio']:.2f}",
                )
                for row in switched
            ],
        )
    return told


# -------------------------------------------------------------------------------------- the truth


def describe_truth(options: Options) -> list[str]:
    told = ["## Against the truth", ""]
    settings = search_truth.Options(values=options.truth_values, rows=options.truth_rows)
    if not settings.rows.is_file() or not settings.values.is_file():
        return [*told, f"Not measured: {settings.rows} is not there.", ""]
    about, tables = search_truth.read_tables(settings)
    rows = search_truth.rows_about(settings.rows, about, settings.kappa)
    if not rows:
        return [*told, f"Not measured: {settings.rows} holds nothing of these values.", ""]
    found = search_truth.summarize(rows, tables)
    told += [
        f"{settings.rows} and {settings.values}, `{COMMAND} search_truth`: the two-layer model, "
        f"{settings.examples} questions in contexts of {settings.length} tokens, kappa "
        f"{settings.kappa}. Every mask was scored; then each search ran on these scores, with "
        f"another seed each time, {settings.seeds} in the end (the column says how many so far), "
        "and no more evaluations than `bosch` makes. The last eight rows of "
        "a table are optimizers over all groups, without stages and without a ranking to start "
        "from.",
        "",
        "- best: per cent of the seeds that found a best mask by the search's own objective; near: "
        f"one less than {search_truth.WITHIN:g} below it",
        "- gap, worst: to the best by its own objective; a+p: to the best by accuracy+probability; "
        "place: the median among all masks by accuracy+probability",
        "",
    ]
    for (ratio,), group in grouped(found, "ratio"):
        best = {by: search_truth.best_of(tables[ratio], by) for by in search_truth.OBJECTIVES}
        told += [
            f"At {ratio:g}, {group[0]['masks']:,} masks, best {best['accuracy']:.3f} by accuracy, "
            f"{best[search_truth.SMOOTH]:.3f} by accuracy+probability; a mask drawn at random is "
            f"{search_truth.mean_gap(tables[ratio], search_truth.SMOOTH):.3f} below that:",
            "",
        ]
        header = ("search", "objective", "evaluations", "seeds", "best", "near", "gap", "worst")
        told += table(
            (*header, "a+p", "place"),
            [
                (
                    row["search"].split(", ")[0],
                    row["objective"],
                    f"{row['evaluations']:.0f}",
                    row["seeds"],
                    f"{row['value']:.0f}",
                    f"{row['near']:.0f}",
                    f"{row['gap']:.4f}",
                    f"{row['worst_gap']:.4f}",
                    f"{row['smooth_gap']:.4f}",
                    f"{row['rank']:.0f}",
                )
                for row in group
            ],
        )
    return told


# -------------------------------------------------------------------------------------- the study


def describe_study(study: Study) -> list[str]:
    options, rows = study.options, study.rows()
    told = ["## On held-out tests", ""]
    if not rows:
        return [*told, f"Not measured: {options.rows} holds nothing of the shipped model.", ""]
    known = {row["name"] for row in rows}
    missing = [
        name for name in dict.fromkeys(name for name, _ in study.plan()) if name not in known
    ]
    told += [
        f"{options.rows}, `{COMMAND} search_study`: the tiny model; each search ran with kappa "
        f"{options.kappa} on calibration sets of other seeds, {options.examples} questions, four "
        f"in a context of {options.length} tokens; its masks were judged on the same "
        f"{options.samples} examples of each task of the test split, of NIAH at {options.length} "
        "tokens and of toy LongBench. An answer is right where every token is the arg-max.",
        "",
        "- both: the mean of NIAH and toy LongBench in per cent, ± its standard error over the "
        "calibration sets; log-probability: of the answers, mean over examples",
        "- S: share of the calibration questions right, on which the mask was chosen",
        "- layer-forwards: those that were computed; masks that another search on the same set had "
        "scored before came from the memo they share, as all of bosch_single's at 0.5 from bosch's",
        "",
    ]
    ends = {row["search"]: row for row in rows if row["kind"] == "end"}
    masks = [row for row in rows if row["kind"] == "mask"]
    for (ratio,), group in grouped([r for r in masks if r["kappa"] == options.kappa], "ratio"):
        groups = study.num_layers * study.num_groups
        budget = num_windowed(ratio, study.num_layers, study.num_groups)
        told += [f"At {ratio:g}, {budget} of {groups} groups on the window:", ""]
        told += compare(group, ends)
        told += describe_kept(group)
        told += describe_difference(group)
    told += ["## What a reviewer would ask", "", *ask_all(rows, options)]
    told += ["## What was not run", ""]
    if missing:
        told += [
            f"{len(missing)} of {len(missing) + len(rows)} rows of the study; `{COMMAND} "
            "search_study` goes on with them:",
            "",
            *shorten(missing),
        ]
    else:
        told += ["Nothing of the study is missing."]
    return [*told, ""]


def shorten(names: Sequence[str]) -> list[str]:
    """A line for each search and kappa, with the seeds that are missing."""
    seeds: dict[str, list[str]] = {}
    for name in names:
        what, _, seed = name.partition(", seed ")
        seeds.setdefault(what, []).append(seed)
    return [
        f"- {what}" + (f": seeds {', '.join(missing)}" if missing != [""] else "")
        for what, missing in seeds.items()
    ]


def compare(masks: Sequence[Row], ends: dict[str, Row]) -> list[str]:
    lines: list[Sequence[object]] = []
    groups = [(name, runs) for (name,), runs in grouped(masks, "search")]
    for name, runs in sorted(groups, key=lambda item: -average(item[1], "mean")):
        judged = [row["calibration"]["accuracy"] for row in runs if row["calibration"]]
        lines.append(
            (
                name,
                len(runs),
                f"{average(runs, 'evaluations'):.0f}",
                f"{average(runs, 'layer_forwards'):,.0f}",
                f"{mean(judged):.2f}" if judged else None,
                f"{average(runs, 'niah'):.1f}",
                f"{average(runs, 'tasks'):.1f}",
                show_mean(row["mean"] for row in runs),
                f"{average(runs, 'log_probability'):.2f}",
            )
        )
    for name, place in (("dense", 0), ("windowed", len(lines) + 1)):
        if name in ends:
            row = ends[name]
            told = [f"{row[key]:.1f}" for key in ("niah", "tasks", "mean")]
            lines.insert(place, (name, *[None] * 4, *told, f"{row['log_probability']:.2f}"))
    header = ("search", "sets", "evaluations", "layer-forwards", "S", "NIAH", "toy LongBench")
    return table((*header, "both", "log-probability"), lines)


def describe_kept(masks: Sequence[Row]) -> list[str]:
    """Of bosch: where its last stage did not find what it ends with."""
    runs = [row for row in masks if row["search"] == "bosch"]
    kept = [row for row in runs if row.get("last_stage")]
    if not kept:
        return []
    scores = [row["last_stage"]["accuracy"] for row in kept]
    single = {row["seed"]: row["z"] for row in masks if row["search"] == "bosch_single"}
    same = sum(row["z"] == single.get(row["seed"]) for row in kept)
    return [
        f"On {len(kept)} of {len(runs)} sets stage 3 of bosch ended lower, at S "
        f"{', '.join(f'{score:.2f}' for score in scores)}, than a mask that stage 1 had passed "
        f"through, which it keeps (`--no-keep-best` ends with stage 3's, as the paper); {same} of "
        "them are bosch_single's.",
        "",
    ]


def describe_difference(masks: Sequence[Row]) -> list[str]:
    """bosch_plus against bosch, set by set."""
    by_seed = {(row["search"], row["seed"]): row["mean"] for row in masks}
    differences = [
        value - by_seed["bosch", seed]
        for (name, seed), value in by_seed.items()
        if name == "bosch_plus" and ("bosch", seed) in by_seed
    ]
    if not differences:
        return []
    return [
        f"bosch_plus less bosch, set by set: {show_mean(differences, '+.1f')} points "
        f"({', '.join(f'{value:+.1f}' for value in differences)}).",
        "",
    ]
