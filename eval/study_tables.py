"""The tables of docs/study.md."""

import itertools
import math
import statistics
from collections.abc import Sequence
from functools import partial

from bosch.analysis.overlap import Agreement, Turnover, compare, turnover
from bosch.analysis.replacement import CHOSEN, ORIGINS
from bosch.mask import GroupMask
from eval.measures import SUITES, Measure
from eval.report_cells import MISSING, show_row, show_seconds, show_tokens
from eval.report_tables import Table
from eval.rows import Row
from eval.run_results import RunResults
from eval.study import (
    BEFORE,
    OURS,
    Advantage,
    Points,
    Study,
    advantage,
    difference,
    leads,
    losses_above,
    points_of_curves,
    points_of_rows,
)
from eval.suites import niah

# Figure 2's, beside BOSCH: rankings of groups that are made once.
STATIC = ("dcam", "apl", "proxy", "qada", "razor", "fisher")
LOSSES = (
    f"Each seed has a held-out text of its own: losses are compared in the column above {OURS}'s, "
    "over the seeds that both have."
)
OVER_SEEDS = (
    "± is one standard error over seeds, in brackets their number; where all seeds gave one mask, "
    "over examples."
)
DENSE_TRAINED = "dense, trained"


def zero_shot_table(study: Study, measure: Measure) -> Table:
    """Methods by ratios before training, the best at the ratio of the training first."""
    rows = []
    for method in study.methods:
        found = {ratio: study.curves(method, ratio, measure).values() for ratio in study.ratios}
        values = {ratio: [float(c.values[BEFORE]) for c in found[ratio]] for ratio in found}
        at = values.get(study.trained_ratio)
        cells = [f"{show_mean(v)} ({len(v)})" if v else MISSING for v in values.values()]
        rows.append((statistics.fmean(at) if at else -1.0, [method, *cells]))
    rows.sort(key=lambda row: -row[0])
    dense = study.dense(measure)
    table = [["dense model", *[dense] * len(study.ratios)], *(row for _, row in rows)]
    number = "Table 1" if measure.suite == "niah" else "Table 2"
    header = ["method", *(f"ratio {ratio:g}" for ratio in study.ratios)]
    note = (
        f"In brackets: seeds. By the scores at {study.trained_ratio:g}. ± 0.0: the seeds gave one "
        "mask, or nothing is left; what the choice of test examples leaves open is in the next "
        "table."
    )
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
    header = [f"{OURS} less", *(f"ratio {ratio:g}" for ratio in study.ratios)]
    title = f"{measure.title}: points of {OURS} above each rival"
    return Table(title, header, rows, "Over the seeds that both have.")


def recovery_table(study: Study) -> Table:
    """Averages and validation loss at the checkpoints, means over seeds."""
    trained = trained_runs(study)
    rows = [
        row
        for name, runs in trained.items()
        for row in course(study, name, runs, trained.get(OURS, []))
    ]
    averages = [measure.title for measure in study.comparison.averages]
    header = ["method", "tokens", "seeds", "validation loss", f"above {OURS}'s", *averages]
    title = f"Figure 3: recovery at ratio {study.trained_ratio:g}"
    return Table(title, header, rows, LOSSES)


def detail_table(study: Study, suite: str) -> Table:
    """The checkpoints of the recovery in detail: NIAH by group and length, or the categories of
    LongBench; means over seeds."""
    number = {"niah": "Table 15", "longbench": "Table 16"}[suite]
    parts = {m.name for m in study.comparison.measures if m.suite == suite and m.kind == "part"}
    shown = set(niah.GROUPS) if suite == "niah" else parts
    found: dict[tuple[str, int, float], dict[tuple[str, int], list[float]]] = {}
    for name, runs in trained_runs(study).items():
        for row in (row for run in runs if run.training for row in run.rows):
            if row["suite"] == suite and row["task"] in shown and row["step"] is not None:
                if suite == "niah" and not row["length"]:
                    continue
                cells = found.setdefault((name, row["step"], row["tokens"]), {})
                cells.setdefault((row["task"], row["length"]), []).append(row["value"])
    columns = list(dict.fromkeys(column for cells in found.values() for column in cells))
    if suite == "niah":
        columns.sort(key=lambda column: (list(niah.GROUPS).index(column[0]), column[1]))
    rows = [
        [name, show_tokens(tokens), *(show_mean(cells.get(column, [])) for column in columns)]
        for (name, _, tokens), cells in found.items()
    ]
    names = [f"{task} {length:,}" if length else task for task, length in columns]
    title = f"{number}: {SUITES[suite]} at the checkpoints"
    return Table(title, ["method", "tokens", *names], rows)


def trained_runs(study: Study) -> dict[str, list[RunResults]]:
    """Of the recovery, the dense model that was trained as well the last."""
    found = {m: study.cells.get((m, study.trained_ratio), []) for m in study.trained}
    return found | {DENSE_TRAINED: [run for run in study.comparison.runs if run.ratio == 0]}


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
    for measure in study.comparison.averages:
        dense = [study.dense(measure)] * len(windows)
        rows.append(["dense model", SUITES[measure.suite], *dense])
    rows.sort(key=lambda row: row[1] != SUITES["niah"])
    title = f"Figure 4: other windows at ratio {study.trained_ratio:g}, masks as they were chosen"
    header = ["method", "", *(f"W {window}" for window in windows)]
    return Table(title, header, rows if windows else [], OVER_SEEDS)


def long_table(study: Study) -> Table:
    lengths = sorted({row["length_asked"] for row in study.long})
    rows = _grid(study.long, "length_asked", lengths)
    count = max((row["n"] for row in study.long), default=0)
    note = (
        f"The model has 2,048 positions; they are stretched by YaRN. {count} examples a model and "
        f"length. {OVER_SEEDS}"
    )
    title = "Table 6: texts longer than the model reads"
    return Table(title, ["method", "", *(f"{n:,} tokens" for n in lengths)], rows, note)


def leads_table(rows: Sequence[Row], across: str, unit: str, title: str) -> Table:
    """Points of BOSCH above each rival in rows of evaluations that belong to no run."""
    found = leads(rows, across)
    places = sorted({place for *_, place in found})
    cells = [
        [rival, SUITES[suite], *(show_advantage(found.get((suite, rival, n))) for n in places)]
        for suite in SUITES
        for rival in dict.fromkeys(row["method"] for row in rows)
        if any((suite, rival, place) in found for place in places)
    ]
    header = [f"{OURS} less", "", *(unit.format(place) for place in places)]
    return Table(f"{title}: points of {OURS} above each rival", header, cells)


def _grid(rows: Sequence[Row], across: str, values: Sequence[int]) -> list[list[str]]:
    table = []
    kinds = dict.fromkeys((row["method"], row["suite"]) for row in rows)
    for method, suite in sorted(kinds, key=lambda kind: kind[1] != "niah"):
        told = [row for row in rows if (row["method"], row["suite"]) == (method, suite)]
        cells = [show_rows([row for row in told if row[across] == value]) for value in values]
        table.append([method, SUITES.get(suite, suite), *cells])
    return table


def show_rows(rows: Sequence[Row]) -> str:
    """The mean over the seeds of rows; of one model under all of them with its own error."""
    if len({row["key"] for row in rows}) > 1:
        return f"{show_mean([row['value'] for row in rows])} ({len(rows)})"
    return show_row(rows[0] if rows else None)


def turnover_table(study: Study) -> Table:
    rows = []
    for method in study.trained:
        for (smaller, larger), found in turnovers(study, method).items():
            shares = [
                [share for one in found if (share := getattr(one, name)) is not None]
                for name in ("raw", "chance", "normalized", "normalized_chance")
            ]
            cells = [show_mean([100 * share for share in values]) for values in shares]
            rows.append([method, f"{smaller:g} to {larger:g}", str(len(found)), *cells])
    header = ["method", "ratios", "seeds", "T, %", "of random masks"]
    header += ["T as a share of the most possible, %", "of random masks"]
    title = "Table 3: windowed groups that a larger ratio leaves full again"
    return Table(title, header, rows, "T: their share of the smaller ratio's windowed groups.")


def turnovers(study: Study, method: str) -> dict[tuple[float, float], list[Turnover]]:
    """Between neighboring ratios of a method, seed by seed."""
    found: dict[tuple[float, float], list[Turnover]] = {}
    for smaller, larger in itertools.pairwise(study.ratios):
        first, second = (masks_by_seed(study, method, ratio) for ratio in (smaller, larger))
        seeds = [seed for seed in first if seed in second]
        if seeds:
            found[smaller, larger] = [turnover(first[seed], second[seed]) for seed in seeds]
    return found


def exchange_table(study: Study) -> Table:
    """Table 5: masks of the larger ratio as chosen and with groups exchanged, by seeds."""
    rows = []
    averages = study.comparison.averages
    for (smaller, larger), of_pair in exchange_pairs(study).items():
        for origin, found in of_pair.items():
            cells = [f"{smaller:g} to {larger:g}", origin, str(max(map(len, found.values())))]
            for points, chosen in ((found[m.suite], of_pair[CHOSEN][m.suite]) for m in averages):
                less = MISSING if origin == CHOSEN else show_advantage(difference(chosen, points))
                cells += [show_points(points), less]
            rows.append(cells)
    header = ["ratios", "groups taken from", "seeds"]
    header += [title for m in averages for title in (m.title, "as chosen less this")]
    note = (
        f"{OURS}'s masks of the larger ratio as chosen; with the groups that the smaller ratio's "
        "mask has on the window and they have not, in place of as many drawn ones; with as many "
        "random groups in place of the same. One draw a seed."
    )
    return Table("Table 5: groups exchanged between ratios", header, rows, note)


def exchange_pairs(study: Study) -> dict[tuple[float, float], dict[str, dict[str, Points]]]:
    """By ratios, where groups are from, and suite."""
    found: dict[tuple[float, float], dict[str, dict[str, Points]]] = {}
    for smaller, larger in sorted({(r["smaller"], r["larger"]) for r in study.exchanged}):
        step = {"smaller": smaller, "larger": larger}
        rows = [row for row in study.exchanged if step.items() <= row.items()]
        seeds = {row["seed"] for row in rows}
        of_pair = found[smaller, larger] = {origin: {} for origin in (CHOSEN, *ORIGINS)}
        for measure in study.comparison.averages:
            curves = study.curves(OURS, larger, measure)
            chosen = {seed: curve for seed, curve in curves.items() if seed in seeds}
            of_pair[CHOSEN][measure.suite] = points_of_curves(chosen, BEFORE)
            for origin in ORIGINS:
                told = points_of_rows(rows, origin=origin, suite=measure.suite)
                of_pair[origin][measure.suite] = told
    return found


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
    first, second = (masks_by_seed(study, name, ratio) for name in (method, other))
    return [compare(first[seed], second[seed]) for seed in first if seed in second]


def masks_by_seed(study: Study, method: str, ratio: float) -> dict[int, GroupMask]:
    runs = study.cells.get((method, ratio), [])
    return {run.seed or 0: run.mask.mask for run in runs if run.mask}


def cost_table(study: Study) -> Table:
    """What a mask costs to choose, at the ratio of the training."""
    rows = []
    for method in study.methods:
        runs = study.cells.get((method, study.trained_ratio), [])
        seconds = [run.stage_seconds["mask"] for run in runs if "mask" in run.stage_seconds]
        counts = [run.mask_cost.get("evaluations") for run in runs]
        told = [float(count) for count in counts if isinstance(count, int | float)]
        learned = [run.learning_tokens for run in runs if run.learning_tokens]
        if runs:
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
        "Means over seeds. Time as it passed, beside other work on the machine. Masks that another "
        "search on the same calibration set has scored are not scored again: most of "
        "bosch_single's are bosch's."
    )
    return Table(f"Cost of a mask at ratio {study.trained_ratio:g}", header, rows, note)


# ------------------------------------------------------------------------------------------- cells


def show_mean(values: Sequence[float], digits: int = 1, sign: str = "") -> str:
    if not values:
        return MISSING
    text = f"{statistics.fmean(values):{sign}.{digits}f}"
    if len(values) == 1:
        return text
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{text} ± {error:.{digits}f}"


def show_points(points: Points) -> str:
    return show_mean([point.value for point in points.values()])


def show_advantage(found: Advantage | None) -> str:
    if found is None:
        return MISSING
    text = f"{found.points:+.1f}"
    text += "" if found.low is None else f" [{found.low:+.1f}, {found.high:+.1f}]"
    return text if found.num_seeds > 1 else f"{text} (1 seed)"
