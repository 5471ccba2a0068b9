"""The tables of docs/study.md."""

import math
import statistics
from collections.abc import Sequence
from functools import partial

from bosch.analysis.overlap import Agreement, compare
from eval.measures import SUITES, Measure
from eval.report_cells import MISSING, show_seconds, show_share, show_tokens
from eval.report_tables import Table
from eval.rows import Row
from eval.run_results import RunResults
from eval.study import BEFORE, OURS, Advantage, Study, advantage, losses_above

# Figure 2's, beside BOSCH: rankings of groups that are made once.
STATIC = ("dcam", "apl", "proxy", "qada", "razor", "fisher")
LOSSES = (
    f"Each seed has a held-out text of its own: losses are compared in the column above {OURS}'s, "
    "over the seeds that both have."
)
ONE_MASK = "Masks of seed 0; ± is one standard error over examples."


def zero_shot_table(study: Study, measure: Measure) -> Table:
    """Methods by ratios before training, the best at the largest ratio first."""
    rows = []
    for method in study.methods:
        found = [study.curves(method, ratio, measure) for ratio in study.ratios]
        values = [[float(c.values[0]) for c in curves.values()] for curves in found]
        order = statistics.fmean(values[-1]) if values[-1] else -1.0
        cells = [f"{show_mean(v)} ({len(v)})" if v else MISSING for v in values]
        rows.append((order, [method, *cells]))
    rows.sort(key=lambda row: -row[0])
    dense = study.dense(measure)
    table = [["dense model", *[dense] * len(study.ratios)], *(row for _, row in rows)]
    number = "Table 1" if measure.suite == "niah" else "Table 2"
    header = ["method", *(f"ratio {ratio:g}" for ratio in study.ratios)]
    note = "In brackets: seeds."
    return Table(f"{number}: {measure.title} before training", header, table, note)


def advantage_table(study: Study, measure: Measure) -> Table:
    """Points of BOSCH above each rival at the same ratio and seeds."""
    rows = []
    for rival in study.methods:
        if rival == OURS:
            continue
        told = [advantage(study, rival, ratio, measure, BEFORE) for ratio in study.ratios]
        if any(one is not None for one in told):
            rows.append([rival, *map(show_advantage, told)])
    header = ["less", *(f"ratio {ratio:g}" for ratio in study.ratios)]
    title = f"{measure.title}: points of {OURS} above each rival"
    return Table(title, header, rows, "Over the seeds that both have.")


def recovery_table(study: Study) -> Table:
    """Averages and validation loss at the checkpoints, means over seeds."""
    trained = {m: study.cells.get((m, study.trained_ratio), []) for m in study.trained}
    trained["dense, trained"] = [run for run in study.comparison.runs if run.ratio == 0]
    rows = [
        row for name, runs in trained.items() for row in course(study, name, runs, trained[OURS])
    ]
    averages = [measure.title for measure in study.comparison.averages]
    header = ["method", "tokens", "seeds", "validation loss", f"above {OURS}'s", *averages]
    title = f"Figure 3, tables 15, 16: recovery at ratio {study.trained_ratio:g}"
    return Table(title, header, rows, LOSSES)


def course(
    study: Study, name: str, runs: Sequence[RunResults], ours: Sequence[RunResults]
) -> list[list[str]]:
    """A row a checkpoint."""
    found: dict[tuple[float, int], dict[Measure, dict[int, float]]] = {}
    for run in runs:
        for measure in study.comparison.averages:
            curve = study.comparison.curve(run.name, measure)
            if curve is None or not curve.is_trained:
                continue
            for tokens, step, value in zip(curve.tokens, curve.steps, curve.values, strict=True):
                cell = found.setdefault((float(tokens), step), {})
                cell.setdefault(measure, {})[run.seed or 0] = float(value)
    rows = []
    for (tokens, step), cell in sorted(found.items()):
        seeds = sorted({seed for values in cell.values() for seed in values})
        told = [run for run in runs if (run.seed or 0) in seeds and step in run.validation_losses]
        losses = [run.validation_losses[step] for run in told]
        above = losses_above(told, ours, partial(loss_at, step=step))
        rows.append(
            [
                name,
                show_tokens(tokens),
                ", ".join(map(str, seeds)),
                show_mean(losses, 3),
                MISSING if runs == ours else show_mean(above, 3, "+"),
                *(show_mean([*cell.get(m, {}).values()]) for m in study.comparison.averages),
            ]
        )
    return rows


def loss_at(run: RunResults, step: int) -> float | None:
    return run.validation_losses.get(step)


def windows_table(study: Study) -> Table:
    windows = sorted({row["window"] for row in study.windows})
    rows = _grid(study.windows, "window", windows)
    title = f"Figure 4: other windows at ratio {study.trained_ratio:g}, masks as they were chosen"
    return Table(title, ["method", "", *(f"W {window}" for window in windows)], rows, ONE_MASK)


def long_table(study: Study) -> Table:
    lengths = sorted({row["length_asked"] for row in study.long})
    rows = _grid(study.long, "length_asked", lengths)
    note = f"The model was trained on 2,048 positions; they are stretched by YaRN. {ONE_MASK}"
    title = "Table 6: texts longer than the model was trained on"
    return Table(title, ["method", "", *(f"{n:,} tokens" for n in lengths)], rows, note)


def _grid(rows: Sequence[Row], across: str, values: Sequence[int]) -> list[list[str]]:
    table = []
    kinds = dict.fromkeys((row["method"], row["suite"]) for row in rows)
    for method, suite in sorted(kinds, key=lambda kind: kind[1] != "niah"):
        told = {r[across]: r for r in rows if (r["method"], r["suite"]) == (method, suite)}
        cells = [_row_cell(told.get(value)) for value in values]
        table.append([method, SUITES.get(suite, suite), *cells])
    return table


def _row_cell(row: Row | None) -> str:
    if row is None:
        return MISSING
    return f"{row['value']:.1f}" + ("" if row["stderr"] is None else f" ± {row['stderr']:.1f}")


def turnover_table(study: Study) -> Table:
    rows = [
        [
            row["method"],
            f"{row['smaller_ratio']:g} to {row['larger_ratio']:g}",
            show_share(row["raw"]),
            show_share(row["chance"]),
            MISSING if row["normalized"] is None else show_share(row["normalized"]),
        ]
        for row in study.turnover
    ]
    header = ["method", "ratios", "T", "T of random masks", "T as a share of the most possible"]
    title = "Table 3: windowed groups that a larger ratio leaves full again"
    return Table(title, header, rows, "Masks of seed 0.")


def replacement_table(study: Study) -> Table:
    rows = [
        [
            row["step"],
            row["origin"],
            str(row["num_replaced"]),
            *(show_mean(row["scores"].get(name, []), 3) for name in ("accuracy", "probability")),
        ]
        for row in study.replacement
    ]
    header = ["ratios", "groups taken from", "replaced", "S", "answer probability"]
    note = (
        "The larger ratio's mask of seed 0 as chosen; with groups that the smaller ratio's mask "
        "has on the window and it has not; with as many random ones. ± is one standard error over "
        "draws of what they replace. On calibration examples; the paper has NIAH and LongBench."
    )
    return Table("Table 5: groups exchanged between ratios", header, rows, note)


def distances_table(study: Study, ratio: float) -> Table:
    """Figure 2: how far masks are from each other, means over seeds."""
    methods = [m for m in (OURS, *STATIC) if (m, ratio) in study.cells]
    rows = []
    for method in methods:
        told = [agreements(study, method, other, ratio) for other in methods]
        rows.append([method, *(show_mean([a.distance for a in found], 2) for found in told)])
    title = f"Figure 2: Jaccard distances of windowed groups at ratio {ratio:g}"
    note = "0: both masks have the same, 1: they have none in common."
    if len(methods) > 1 and (pairs := agreements(study, methods[0], methods[1], ratio)):
        note += f" Random masks are {pairs[0].expected_distance:.2f} from each other."
    return Table(title, ["", *methods], rows if len(methods) > 1 else [], note)


def agreements(study: Study, method: str, other: str, ratio: float) -> list[Agreement]:
    """Of the masks of two methods, seed by seed."""
    first, second = (
        {run.seed: run.mask.mask for run in study.cells.get((name, ratio), []) if run.mask}
        for name in (method, other)
    )
    return [compare(first[seed], second[seed]) for seed in first if seed in second]


def cost_table(study: Study) -> Table:
    """What a mask costs to choose: means over ratios and seeds."""
    rows = []
    for method in study.methods:
        runs = [run for (name, _), cell in study.cells.items() if name == method for run in cell]
        seconds = [run.stage_seconds["mask"] for run in runs if "mask" in run.stage_seconds]
        counts = [run.mask_cost.get("evaluations") for run in runs]
        told = [float(count) for count in counts if isinstance(count, int | float)]
        learned = [run.learning_tokens for run in runs if run.learning_tokens]
        rows.append(
            [
                method,
                show_seconds(statistics.fmean(seconds)) if seconds else MISSING,
                f"{statistics.fmean(told):,.0f}" if told else MISSING,
                show_tokens(statistics.fmean(learned)) if learned else MISSING,
                str(len(runs)),
            ]
        )
    header = ["method", "time", "evaluations", "tokens to learn from", "runs"]
    note = (
        "Time as it passed, beside other work on the machine. Masks that another search on the "
        "same calibration set has scored are not scored again: most of bosch_single's are bosch's."
    )
    return Table("Cost of a mask", header, rows, note)


# ------------------------------------------------------------------------------------------- cells


def show_mean(values: Sequence[float], digits: int = 1, sign: str = "") -> str:
    if not values:
        return MISSING
    text = f"{statistics.fmean(values):{sign}.{digits}f}"
    if len(values) == 1:
        return text
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{text} ± {error:.{digits}f}"


def show_advantage(found: Advantage | None) -> str:
    if found is None:
        return MISSING
    text = f"{found.points:+.1f}"
    text += "" if found.low is None else f" [{found.low:+.1f}, {found.high:+.1f}]"
    return text if found.num_seeds > 1 else f"{text} (1 seed)"
