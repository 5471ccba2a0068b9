"""The tables of a report, as text in cells: one form for page, markdown and terminal."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bosch.eval.report.cells import (
    MISSING,
    show_advantage,
    show_change,
    show_count,
    show_estimate,
    show_points,
    show_row,
    show_score,
    show_seconds,
    show_share,
    show_tokens,
)
from bosch.eval.report.compare import (
    Comparison,
    Recovery,
    beside_baseline,
    falls,
    kind_means,
    mask_distance,
    recoveries,
)
from bosch.eval.report.measures import SUITES, Measure, Row, Score
from bosch.eval.report.runs import RunResults
from bosch.eval.report.statistics import LEVEL, Curve
from bosch.eval.suites import niah

BYTES_PER_VALUE = 2  # of the KV cache: bf16
SEEDS = "± standard error over seeds; in parentheses their number."


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def make_tables(comparison: Comparison) -> dict[str, Table]:
    """All tables that have a row, by name."""
    tables = {
        "runs": overview(comparison),
        "recovery": recovery_table(comparison),
        "baseline": baseline_table(comparison),
        "seeds_before": seed_table(comparison, at_end=False),
        "seeds_after": seed_table(comparison, at_end=True),
        "variants": variants_table(comparison),
        "falls": falls_table(comparison),
        **{f"{suite}_scores": score_table(comparison, suite) for suite in SUITES},
        "niah_lengths": lengths_table(comparison),
        "cost": cost_table(comparison),
        "distances": distances(comparison),
    }
    return {name: table for name, table in tables.items() if table.rows}


def overview(comparison: Comparison) -> Table:
    """What each run is and what became of its averages."""
    rows = [
        [
            run.name,
            run.method,
            MISSING if run.ratio is None else f"{run.ratio:g}",
            show_count(run.window),
            show_count(run.seed),
            kv_saved(run),
            show_count(run.trained_tokens),
            *(_path(comparison, run, measure) for measure in comparison.averages),
        ]
        for run in comparison.runs
    ]
    header = ["run", "method", "ratio", "window", "seed", "KV bytes saved", "tokens trained"]
    header += [f"{measure.title}: step 0 → end (dense)" for measure in comparison.averages]
    note = "KV bytes of one text as long as a training sequence, two bytes a value."
    return Table("Runs", header, rows, note)


def short_table(comparison: Comparison) -> Table:
    """The terminal's: scores, and the share of the gap that was closed."""
    shares = {(row.run, row.measure.suite): show_gap_share(row) for row in recoveries(comparison)}
    header, rows = ["run", "trained"], []
    for measure in comparison.averages:
        header += [f"{SUITES[measure.suite]} (dense)", "gap closed"]
    for run in comparison.runs:
        trained = run.trained_tokens
        cells = [run.name, MISSING if trained is None else show_tokens(trained)]
        for measure in comparison.averages:
            share = shares.get((run.name, measure.suite), MISSING)
            cells += [_path(comparison, run, measure), share]
        rows.append(cells)
    return Table("", header, rows)


def course_table(comparison: Comparison, run: RunResults) -> Table:
    """One run's averages and losses, from the dense model over step 0 to the end."""
    losses = run.validation_losses
    rows = []
    for step, tokens, cells in _course(comparison, run, comparison.averages):
        name = "dense model" if step is None else f"step {step}"
        loss = f"{losses[step]:.4f}" if step in losses else MISSING
        rows.append([name, tokens, loss, *cells])
    header = ["", "tokens", "validation loss", *(m.title for m in comparison.averages)]
    return Table("", header, rows)


def recovery_table(comparison: Comparison) -> Table:
    rows = [
        [
            row.run,
            SUITES[row.measure.suite],
            show_gap_share(row),
            show_estimate(row.tokens_to_half, show_tokens),
            show_estimate(row.tokens_to_90, show_tokens),
            show_estimate(row.mean_score, show_points),
        ]
        for row in recoveries(comparison)
    ]
    header = ["run", "suite", "gap closed", "tokens to half", "tokens to 90 %", "mean score"]
    note = (
        "Gap closed: of the points between step 0 and the dense model, the share that the last "
        "checkpoint has won back. Tokens: the first time that a line between checkpoints reaches "
        "that share, those that a mask learned from included. Mean score: area under the curve "
        "over its width, on the stretch that all runs have. In brackets the middle "
        f"{LEVEL:.0%} of replicates with examples drawn anew, the same ones for all models."
    )
    return Table("How far and how fast", header, rows, note)


def baseline_table(comparison: Comparison) -> Table:
    """Paired differences, over the seeds that both have."""
    rows = [
        [row.kind, row.measure.title, *map(show_advantage, (row.start, row.end, row.mean))]
        for row in beside_baseline(comparison)
    ]
    header = ["runs", "score", "points before training", "points at the end"]
    note = (
        "Points more than the baseline of the same model, ratio, window and seed. In brackets the "
        f"middle {LEVEL:.0%} of replicates in which seeds and examples are drawn anew, the same "
        "ones for both; * where they exclude zero; in parentheses the number of seeds. One seed "
        "says nothing of others, and few make intervals too narrow."
    )
    title = f"Beside {comparison.baseline}"
    return Table(title, [*header, "points of mean score"], rows, note)


def seed_table(comparison: Comparison, at_end: bool) -> Table:
    """Tables 1 and 2 before training, where any kind of run has more than one seed."""
    rows, most = _mean_rows(comparison, comparison.averages, at_end)
    title = f"Means over seeds, {'at the end' if at_end else 'before training'}"
    header = ["runs", *(measure.title for measure in comparison.averages)]
    return Table(title, header, rows if most > 1 else [], SEEDS)


def variants_table(comparison: Comparison) -> Table:
    """Figure 4 and table 6."""
    measures = comparison.variants
    rows, _ = _mean_rows(comparison, measures, at_end=False)
    dense = {run.model: run.name for run in comparison.runs}
    for model, name in dense.items():
        cells = [_score(comparison.dense_score(name, measure)) for measure in measures]
        rows += [[f"{model}, dense", *cells]] if {*cells} - {MISSING} else []
    note = f"{SEEDS} Masks as they were chosen, for the run's own window; longer texts by YaRN."
    header = ["runs", *(measure.title for measure in measures)]
    return Table("Other windows and lengths, before training", header, rows, note)


def _mean_rows(
    comparison: Comparison, measures: Sequence[Measure], at_end: bool
) -> tuple[list[list[str]], int]:
    """Means over seeds by kind of run, and the most seeds that one is over."""
    means = [{m.kind: m for m in kind_means(comparison, measure, at_end)} for measure in measures]
    rows = []
    for kind in dict.fromkeys(kind for found in means for kind in found):
        cells = [found.get(kind) for found in means]
        shown = (m and f"{show_score(m.mean, m.stderr)} ({len(m.values)})" for m in cells)
        rows.append([kind, *(cell or MISSING for cell in shown)])
    return rows, max((len(m.values) for found in means for m in found.values()), default=0)


def score_table(comparison: Comparison, suite: str) -> Table:
    """Every measure of a suite at every checkpoint with its standard error."""
    measures = [measure for measure in comparison.measures if measure.suite == suite]
    rows = [
        [run.name, "dense" if step is None else str(step), tokens, *cells]
        for run in comparison.runs
        for step, tokens, cells in _course(comparison, run, measures)
        if step is not None or {*cells} != {MISSING}
    ]
    header = ["run", "step", "tokens", *(m.name.removeprefix("niah_") for m in measures)]
    note = "± standard error over examples."
    if suite == "niah":
        note += " A task is the mean over its lengths."
    return Table(f"{SUITES[suite]} scores", header, rows, note)


def lengths_table(comparison: Comparison) -> Table:
    """NIAH by group of tasks and length, as the paper's tables 7, 9, 11, 13 and 15 have it."""
    places: dict[tuple[str, int | None], dict[tuple[str, int], Row]] = {}
    for run in comparison.runs:
        of_groups = [row for row in run.rows if row["suite"] == "niah" and row["length"]]
        for row in sorted(of_groups, key=lambda row: -1 if row["step"] is None else row["step"]):
            if row["task"] in niah.GROUPS:
                cells = places.setdefault((run.name, row["step"]), {})
                cells[row["task"], row["length"]] = row
    known = {cell for cells in places.values() for cell in cells}
    columns = sorted(known, key=lambda cell: (list(niah.GROUPS).index(cell[0]), cell[1]))
    rows = [
        [run, "dense" if step is None else str(step), *(show_row(cells.get(c)) for c in columns)]
        for (run, step), cells in places.items()
    ]
    header = ["run", "step", *(f"{group} {length:,}" for group, length in columns)]
    return Table("NIAH by length", header, rows, "± standard error over examples.")


def falls_table(comparison: Comparison) -> Table:
    rows = []
    for fall in falls(comparison):
        points = show_estimate(fall.points, show_change)
        rows.append([fall.run, fall.measure.full_title, str(fall.step), points, fall.certainty])
    note = "Points lost since step 0; clear: the interval does not reach zero."
    return Table("Checkpoints below step 0", ["run", "score", "step", "points", ""], rows, note)


def cost_table(comparison: Comparison) -> Table:
    """What each mask cost to find, and the run's stages."""
    counts = ("evaluations", "layer_forwards", "learning_tokens")
    rows = [
        [
            run.name,
            calibration_score(run),
            *(show_count(run.mask_cost.get(name)) for name in counts),
            show_seconds(run.mask_cost.get("seconds")),
            show_seconds(run.stage_seconds.get("train")),
            show_count(run.trained_tokens),
        ]
        for run in comparison.runs
        if run.mask is not None
    ]
    header = ["run", "S of the mask (dense)", "evaluations", "layer-forwards"]
    header += ["tokens for the mask", "mask time", "training time", "tokens trained"]
    return Table("Cost", header, rows)


def distances(comparison: Comparison) -> Table:
    runs = [run for run in comparison.runs if run.mask is not None]
    if len(runs) < 2:
        return Table("Jaccard", [], [])
    rows = []
    for run in runs:
        values = [mask_distance(run, other) for other in runs]
        rows.append([run.name, *(MISSING if v is None else f"{v:.2f}" for v in values)])
    note = "Of groups on the window. 0: both masks have the same, 1: they have none in common."
    return Table("Jaccard distance of masks", ["", *(run.name for run in runs)], rows, note)


def show_gap_share(row: Recovery) -> str:
    if math.isnan(row.curve.dense):
        return MISSING
    return show_estimate(row.gap_share, show_share) if row.has_clear_gap else "no clear gap"


def kv_saved(run: RunResults) -> str:
    if run.mask is None:
        return MISSING
    mask, model = run.mask.mask, run.mask.model
    context = run.config.get("data", {}).get("sequence_length") or 16 * mask.window_tokens
    now = mask.kv_bytes(context, model.head_dim, BYTES_PER_VALUE)
    dense = mask.num_total * context * 2 * model.head_dim * BYTES_PER_VALUE
    return f"{1 - now / dense:.0%} at {context:,} tokens"


def calibration_score(run: RunResults) -> str:
    """What a search noted of S, beside the dense model's: `0.83 (0.98)`."""
    found = (run.mask_cost.get(name) for name in ("hybrid", "dense"))
    values = [told.get("accuracy") if isinstance(told, dict) else None for told in found]
    known = [f"{value:.2f}" if isinstance(value, int | float) else None for value in values]
    return f"{known[0]} ({known[1] or MISSING})" if known[0] else MISSING


# ---------------------------------------------------------------------------------------- cells


def _path(comparison: Comparison, run: RunResults, measure: Measure) -> str:
    """`31.2 → 88.0 (95.8)`."""
    curve = comparison.curve(run.name, measure)
    dense = comparison.dense_score(run.name, measure)
    beside = f" ({dense.value:.1f})" if dense else f" ({MISSING})"
    if curve is None:
        return MISSING + beside
    first = f"{curve.values[0]:.1f}" if curve.starts_at_zero else MISSING
    trained = len(curve.steps) > 1 or not curve.starts_at_zero
    return f"{first} → {curve.values[-1]:.1f}{beside}" if trained else f"{first}{beside}"


def _course(
    comparison: Comparison, run: RunResults, measures: Sequence[Measure]
) -> Iterator[tuple[int | None, str, list[str]]]:
    """Step, tokens and a cell a measure: of the dense model (step None), then of every point."""
    curves = [comparison.curve(run.name, measure) for measure in measures]
    yield None, MISSING, [_score(comparison.dense_score(run.name, m)) for m in measures]
    steps = {
        step: tokens
        for curve in curves
        if curve
        for step, tokens in zip(curve.steps, curve.tokens, strict=True)
    }
    for step in sorted(steps):
        yield step, show_tokens(steps[step]), [_point(curve, step) for curve in curves]


def _score(found: Score | None) -> str:
    return MISSING if found is None else show_score(found.value, found.stderr)


def _point(curve: Curve | None, step: int) -> str:
    if curve is None or step not in curve.steps:
        return MISSING
    place = curve.steps.index(step)
    return show_score(curve.values[place], curve.stderrs[place])


def align(table: Table) -> list[str]:
    """The table as lines of plain text."""
    lines = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def markdown_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return [f"| {' | '.join(line)} |" for line in lines]


def settings_by_section(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Section by section, `field value` one after the other; what belongs to none comes first."""
    plain = {name: value for name, value in config.items() if not isinstance(value, dict)}
    sections = {name: value for name, value in config.items() if isinstance(value, dict)}
    return [
        (section, ", ".join(f"{name} {value}" for name, value in values.items()))
        for section, values in {"run": plain, **sections}.items()
        if values or section != "run"
    ]
