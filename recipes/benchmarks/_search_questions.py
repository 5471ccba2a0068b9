"""What a reviewer would ask of the stages of a search, answered from the rows of `search_study`:
the sections of docs/search.md behind the comparison.
"""

from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import mean
from typing import Any

import numpy as np

from bosch.analysis.performance import pearson, rank
from bosch.search.ratios import layer_drops
from recipes.benchmarks._search import average, grouped, show_mean, table
from recipes.benchmarks.search_study import Options

Row = dict[str, Any]


def ask_all(rows: Sequence[Row], options: Options) -> list[str]:
    masks = [row for row in rows if row["kind"] == "mask"]
    return [
        *ask_stability([row for row in masks if row["kappa"] == options.kappa]),
        *ask_kappa([row for row in masks if row["ratio"] == options.ratios[0]]),
        *ask_order(rows, options),
        *ask_groups([row for row in rows if row["kind"] == "groups"]),
    ]


def ask_stability(masks: Sequence[Row]) -> list[str]:
    told = [
        "**Is what stage 1 says of the layers stable over calibration sets?** Rank correlation of "
        "what each layer costs, mean over pairs of sets (and the least):",
        "",
    ]
    lines = []
    for (ratio,), group in grouped(masks, "ratio"):
        for what, measured in (
            ("stage 1 of bosch", [drops(row) for row in group if row["search"] == "bosch"]),
            (
                "whole-layer probes of bosch_plus",
                [harm(row) for row in group if row["search"] == "bosch_plus"],
            ),
        ):
            found = [spearman(a, b) for a, b in combinations(measured, 2)]
            known = [value for value in found if value is not None]
            if known:
                told_of = (f"{mean(known):+.2f}", f"{min(known):+.2f}")
                lines.append((what, f"{ratio:g}", len(measured), *told_of))
    if not lines:
        return [*told, "Not measured: it takes two sets.", ""]
    return told + table(("measured by", "ratio", "sets", "mean", "least"), lines)


def ask_kappa(masks: Sequence[Row]) -> list[str]:
    lines = []
    for (name, kappa), runs in sorted(grouped(masks, "search", "kappa")):
        if name in ("bosch", "bosch_plus"):
            lines.append(
                (
                    name,
                    kappa,
                    len(runs),
                    f"{average(runs, 'evaluations'):.0f}",
                    f"{mean(row['calibration']['accuracy'] for row in runs):.3f}",
                    show_mean(row["mean"] for row in runs),
                    f"{average(runs, 'log_probability'):.2f}",
                )
            )
    if not lines:
        return ["**How much does the budget matter?** Not measured yet.", ""]
    ratio = f"{masks[0]['ratio']:g}"
    header = ("search", "kappa", "sets", "evaluations", "S", "both", "log-probability")
    return [
        f"**How much does the budget matter?** At {ratio}, by kappa:",
        "",
        *table(header, lines),
        *tell_repeated(masks),
    ]


def tell_repeated(masks: Sequence[Row]) -> list[str]:
    """Where a larger budget ended in the same masks."""
    told = []
    for (name,), runs in grouped(masks, "search"):
        if name not in ("bosch", "bosch_plus"):
            continue
        found: dict[int, dict[int, Any]] = {}
        for row in runs:
            found.setdefault(row["kappa"], {})[row["seed"]] = row["z"]
        for less, more in pairwise(sorted(found)):
            shared = found[less].keys() & found[more].keys()
            same = [seed for seed in shared if found[less][seed] == found[more][seed]]
            if same:
                told.append(
                    f"{name} ends in the same mask at kappa {more} as at {less} on {len(same)} of "
                    f"{len(shared)} sets."
                )
    if not told:
        return []
    why = (
        "Stage 1 enumerates a layer once kappa reaches the number of its candidates; bosch keeps "
        "the best mask it has seen, that of stage 1 if stage 3 finds none above it; and the last "
        "search of bosch_plus gets what stage 1 would have taken, or kappa if that is more."
    )
    return [" ".join([*told, why]), ""]


def ask_order(rows: Sequence[Row], options: Options) -> list[str]:
    told = [
        "**Does stage 2 order the layers by what they are worth?** Rank correlation of what "
        "stage 1 says each layer costs with what the tests say, each layer wholly on the window "
        "alone; mean over calibration sets:",
        "",
    ]
    dense = next((row for row in rows if row["name"] == "dense"), None)
    layers = [row for row in rows if row["kind"] == "layer"]
    if not layers or dense is None:
        return [*told, "Not measured yet.", ""]
    layers.sort(key=lambda row: row["layer"])
    truth = {key: [dense[key] - row[key] for row in layers] for key in ("log_probability", "mean")}
    lines = []
    for ratio in options.ratios:
        for name, measured_by in (("bosch", drops), ("bosch_plus", harm)):
            wanted = f"{name} at {ratio:g}, kappa {options.kappa}, "
            runs = [row for row in rows if row["name"].startswith(wanted)]
            for key in truth if runs else ():
                found = [spearman(measured_by(row), truth[key]) for row in runs]
                known = [value for value in found if value is not None]
                what = "score" if key == "mean" else "log-probability"
                cell = f"{mean(known):+.2f}" if known else None
                lines.append((name, f"{ratio:g}", what, len(runs), cell))
    told += table(("stage 1 of", "ratio", "tests by", "sets", "correlation"), lines)
    costs = [f"{value:.1f}" for value in truth["mean"]]
    return [*told, f"Points lost on the tests, from the bottom layer up: {', '.join(costs)}.", ""]


def ask_groups(rows: Sequence[Row]) -> list[str]:
    told = [
        "**Is a group worth in the hybrid what it is worth in the full model?** What its full "
        "attention adds to the answers' mean log-probability, with all other groups full, and in "
        "the hybrid that bosch_plus found; by rank over all groups, and of the ten worth most in "
        "the full model those among the ten worth most in the hybrid:",
        "",
    ]
    if not rows:
        return [*told, "Not measured yet.", ""]
    lines = []
    for row in rows:
        top = [set(np.argsort(row[side])[::-1][:10].tolist()) for side in ("full", "hybrid")]
        found = spearman(row["full"], row["hybrid"])
        cell = None if found is None else f"{found:+.2f}"
        lines.append((f"{row['ratio']:g}", len(row["full"]), cell, len(top[0] & top[1])))
    return told + table(("ratio", "groups", "correlation", "of the first ten"), lines)


def drops(row: Row) -> list[float]:
    """What each layer cost in stage 1 of bosch, in accuracy."""
    return [float(d) for d in layer_drops([*row["stage1_scores"], row["dense"]["accuracy"]])]


def harm(row: Row) -> list[float]:
    """What each layer alone cost in the probes of bosch_plus."""
    return [-value for value in row["whole_layer_log_probabilities"]]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Correlation of ranks; None where one of them does not vary."""
    return pearson(*(rank(np.asarray(values, dtype=float)) for values in (first, second)))
