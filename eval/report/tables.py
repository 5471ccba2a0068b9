"""The tables of a report, as cells of text: the same for page, markdown and terminal."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from bosch.eval.report import compare
from bosch.eval.report.compare import SHARES, Comparison, Recovery
from bosch.eval.report.intervals import LEVEL, NEVER, Curve, Estimate, Point, estimate, gap_at
from bosch.eval.report.paired import Paired, beside_dense
from bosch.eval.report.runs import LOSSES, RunResults, Spent
from bosch.eval.suites._reporting import ReportedScore, reporting_of
from bosch.run.progress import describe_seconds

MISSING = "–"
EXAMPLES = "± standard error over examples."
BESIDE = (
    "In points above the other model, on the same examples. Kept: of what the other model answers, "
    f"the share that this one answers. In brackets: {LEVEL:.0%} bootstrap interval over examples, "
    "the same for both: where it holds 0, the difference may be as large as its ends say."
)
SEEDS = "± standard error over seeds; in parentheses: the number of seeds."


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def make_tables(comparison: Comparison) -> dict[str, Table]:
    """All tables that have a row, by name."""
    suites = comparison.suites
    tables = {
        "runs": overview(comparison),
        "recovery": recovery_table(comparison),
        "dense": dense_table(comparison),
        "baseline": baseline_table(comparison),
        "seeds_before": seed_table(comparison, at_end=False),
        "seeds_after": seed_table(comparison, at_end=True),
        "variants": variants_table(comparison),
        **{f"{suite}_scores": score_table(comparison, suite) for suite in suites},
        **{f"{suite}_lengths": lengths_table(comparison, suite) for suite in suites},
        "positions": positions_table(comparison),
        "cost": cost_table(comparison),
    }
    return {name: table for name, table in tables.items() if table.rows}


def overview(comparison: Comparison) -> Table:
    averages = comparison.scores_of("average")
    rows = [
        [
            run.name,
            run.method,
            MISSING if run.settings["ratio"] is None else f"{run.settings['ratio']:g}",
            show_or_missing(run.settings["window"]),
            show_or_missing(run.settings["seed"]),
            kv_saved(run),
            show_or_missing(run.trained_tokens),
            *(show_ends(comparison.curves[run.name, score]) for score in averages),
        ]
        for run in comparison.runs
    ]
    header = ["run", "method", "ratio", "window", "seed", "KV bytes saved", "training tokens"]
    header += [f"{score.title}: step 0 → end (dense)" for score in averages]
    note = "KV bytes saved: for one sequence as long as in training; our cache's spare room counts."
    return Table("Runs", header, rows, note)


def short_table(comparison: Comparison) -> Table:
    """The terminal's: scores, and the share of the gap that was recovered."""
    # By run and score: not every run has a recovery, as before training.
    shares = {(r.curve.run.name, r.curve.score): show_gap_share(r) for r in comparison.recoveries}
    header, rows = ["run", "tokens"], []
    for score in comparison.headlines:
        header += [f"{score.headline} (dense)", "gap recovered"]
    for run in comparison.runs:
        rows.append([run.name, show_tokens(run.trained_tokens)])
        for score in comparison.headlines:
            share = shares.get((run.name, score), MISSING)
            rows[-1] += [show_ends(comparison.curves[run.name, score]), share]
    return Table("", header, rows)


def recovery_table(comparison: Comparison) -> Table:
    rows = []
    for row in comparison.recoveries:
        tokens = [show_estimate(tokens, show_tokens) for tokens in row.tokens_to.values()]
        spent = row.curve.run.spent_until(row.tokens_to[0.9].value)
        tokens.append(show_spent(spent))
        # Of a gap that may be none they would say nothing either.
        tokens = tokens if row.has_clear_gap else [MISSING] * len(tokens)
        names = [row.curve.run.name, row.curve.score.headline]
        rows.append([*names, show_gap_share(row), *tokens])
    header = ["run", "suite", "gap recovered", *(f"tokens to {share:.0%}" for share in SHARES)]
    header.append("training to 90%")
    note = (
        "Gap recovered: the share of the gap between step 0 and the dense model that the last "
        "checkpoint has closed. Tokens: with those of a learned mask (FLOPs and time: without), "
        "interpolated between checkpoints. FLOPs and time: with a teacher's, asked at every step "
        "or stored for the tokens until then. In brackets: "
        f"{LEVEL:.0%} bootstrap interval over examples, the same for all models."
    )
    return Table("Recovery", header, rows, note)


def dense_table(comparison: Comparison) -> Table:
    found = beside_dense(comparison)
    rows = [[run.name, show_step(step), *_beside(paired)] for run, step, paired in found]
    header = ["run", "step", "score", "examples", "model", "dense", "difference", "kept"]
    return Table("Difference from the dense model, in points", header, rows, BESIDE)


def paired_table(title: str, found: Iterable[Paired]) -> Table:
    """One model beside another."""
    header = ["score", "examples", "model", "other", "difference", "kept"]
    return Table(title, header, [_beside(one) for one in found], BESIDE)


def _beside(paired: Paired) -> list[str]:
    return [
        paired.score.title,
        f"{paired.num_examples:,}",
        show_points(paired.value),
        show_points(paired.other),
        show_estimate(paired.difference, show_change),
        MISSING if paired.kept.low is None else show_estimate(paired.kept, show_share),
    ]


def baseline_table(comparison: Comparison) -> Table:
    """Paired differences, over the seeds that both have."""
    rows = [
        [row.setup, row.score.title, *(show_difference(row.score, e) for e in (row.start, row.end))]
        for row in comparison.differences
    ]
    note = (
        "Above the baseline run of the same model, ratio, window and seed, but for what the "
        f"baseline names. In brackets: {LEVEL:.0%} interval over seeds and examples, the same for "
        "both runs; * marks those without zero, one in twenty by chance. In parentheses: the "
        "number of seeds. Two or three say little, so that the intervals are wide."
    )
    header = ["runs", "score", "before training", "after training"]
    title = f"Difference from {comparison.baseline.title}, in points, of the loss in nats"
    return Table(title, header, rows, note)


def seed_table(comparison: Comparison, at_end: bool) -> Table:
    """Tables 1 and 2 of the paper are those before training. Empty if no setup has two seeds."""
    averages = comparison.scores_of("average")
    columns = {s: compare.seeds_of_setups(comparison, s, at_end) for s in averages}
    has_seeds = any(len(seeds) > 1 for column in columns.values() for seeds in column.values())
    title = f"Means over seeds, {'after' if at_end else 'before'} training"
    header, rows = _means(columns, -1 if at_end else 0)
    return Table(title, header, rows if has_seeds else [], SEEDS)


def variants_table(comparison: Comparison) -> Table:
    """Figure 4 and table 6 of the paper."""
    variants = comparison.scores_of("variant")
    columns = {s: compare.seeds_of_setups(comparison, s, at_end=False) for s in variants}
    header, rows = _means(columns, 0)
    for model, run in {run.settings["model"]: run for run in comparison.runs}.items():
        curves = [comparison.curves[run.name, score] for score in variants]
        # Once for each model: its dense scores do not depend on a run.
        if any(None in curve.points for curve in curves):
            rows.append([f"{model}, dense", *(show_score(c.points.get(None)) for c in curves)])
    note = f"{SEEDS} Each mask was chosen for its run's own window. Longer texts use YaRN."
    return Table("Other windows and lengths, before training", header, rows, note)


def _means(
    columns: Mapping[ReportedScore, Mapping[str, Sequence[Curve]]], place: int
) -> tuple[list[str], list[list[str]]]:
    """A header, and a row of means over the seeds of each setup."""
    rows = {setup: [setup] for column in columns.values() for setup in column}
    for setup, cells in rows.items():
        for column in columns.values():
            # At the first or at the last point: that is 0 or -1, whatever the steps in between.
            values = [curve.values[place] for curve in column.get(setup, ())]
            count = len(values)
            sem = stdev(values) / math.sqrt(count) if count > 1 else math.nan
            cells.append(f"{show_score(Point(fmean(values), sem))} ({count})" if count else MISSING)
    return ["runs", *(score.title for score in columns)], list(rows.values())


def score_table(comparison: Comparison, suite: str) -> Table:
    """Every score of a suite at every checkpoint."""
    scores = [score for score in comparison.scores if score.suite == suite]
    rows = [
        [run.name, show_step(step), *cells]
        for run in comparison.runs
        for step, *cells in _checkpoints(comparison, run, scores)
        # A step that was evaluated by other suites only has no row here.
        if {*cells[1:]} != {MISSING}
    ]
    header = ["run", "step", "tokens", *(score.name.removeprefix(f"{suite}_") for score in scores)]
    has_lengths = any(length for score in scores for _, length in score.weights)
    note = f"{EXAMPLES} Each task is the mean over its lengths." if has_lengths else EXAMPLES
    return Table(f"{reporting_of(suite).title} scores", header, rows, note)


def checkpoint_table(comparison: Comparison, run: RunResults) -> Table:
    """One run's averages and losses: the dense model, step 0, every checkpoint."""
    losses = {row["step"]: row.get("validation_loss") for row in run.training}
    rows, averages = [], comparison.scores_of("average")
    for step, tokens, *cells in _checkpoints(comparison, run, averages):
        name = "dense model" if step is None else f"step {step}"
        loss = losses.get(step)
        rows.append([name, tokens, MISSING if loss is None else f"{loss:.4f}", *cells])
    header = ["", "tokens", "validation loss", *(score.title for score in averages)]
    return Table("", header, rows)


def _checkpoints(
    comparison: Comparison, run: RunResults, scores: Sequence[ReportedScore]
) -> list[tuple[Any, ...]]:
    """Step, tokens and a cell per score: of the dense model, then of every checkpoint."""
    curves = [comparison.curves[run.name, score] for score in scores]
    # A step is a row if any score has it; suites may have been evaluated at different ones.
    tokens = {step: curve.points[step].tokens for curve in curves for step in curve.steps}
    shown = {None: MISSING} | {step: show_tokens(tokens[step]) for step in sorted(tokens)}
    return [(s, shown[s], *(show_score(curve.points.get(s)) for curve in curves)) for s in shown]


def lengths_table(comparison: Comparison, suite: str) -> Table:
    """Results by task and length, at every checkpoint. Empty if the suite's have no lengths."""
    reporting = reporting_of(suite)
    points = {}
    for run in comparison.runs:
        with_length = [row for row in run.rows if row["suite"] == suite and row["length"]]
        for step in sorted({row["step"] for row in with_length}, key=compare.in_order):
            rows = [row for row in with_length if row["step"] == step]
            points[run.name, step] = compare.headline_points(suite, rows)
    columns = list(dict.fromkeys(cell for cells in points.values() for cell in cells))
    tasks = list(reporting.tasks_by_length or dict.fromkeys(task for task, _ in columns))
    columns = [cell for cell in columns if cell[0] in tasks]
    # Tasks in the suite's order, each with its lengths side by side: a reader compares lengths of
    # one task.
    columns.sort(key=lambda cell: (tasks.index(cell[0]), cell[1]))
    shown = [
        [run, show_step(step), *(show_score(cells.get(cell)) for cell in columns)]
        for (run, step), cells in points.items()
        if any(cell in cells for cell in columns)
    ]
    header = ["run", "step", *(f"{task} {length:,}" for task, length in columns)]
    return Table(f"{reporting.title} by length", header, shown, EXAMPLES)


def positions_table(comparison: Comparison) -> Table:
    """Where windows lose: the loss by the place in a document, before and after training."""
    shown: list[tuple[str, str, Mapping[str, float]]] = []
    for run in comparison.runs:
        losses = {
            None if name.startswith("dense") else row["step"]: row[f"{name}_by_position"]
            for row in run.training
            for name in LOSSES
            if isinstance(row.get(f"{name}_by_position"), dict)
        }
        steps = [step for step in losses if step is not None]
        # The dense model, the first step and the last: what the training changed.
        for step in dict.fromkeys((None, *steps[:1], *steps[-1:])):
            if step in losses:
                shown.append((run.name, show_step(step), losses[step]))
    places = list(dict.fromkeys(place for _, _, losses in shown for place in losses))
    rows = [
        [run, step, *(f"{losses[p]:.3f}" if p in losses else MISSING for p in places)]
        for run, step, losses in shown
    ]
    note = "Of held-out texts, from this position of a document up to the next column's."
    header = ["run", "step", *(f"from {int(place):,}" for place in places)]
    return Table("Validation loss by position", header, rows, note)


def cost_table(comparison: Comparison) -> Table:
    """What finding each mask and training the run took."""
    counts = ("evaluations", "layer_forwards", "learning_tokens")
    rows = [
        [
            run.name,
            calibration_score(run),
            *(show_or_missing(run.mask_cost.get(name)) for name in counts),
            show_or_missing(run.mask_cost.get("seconds"), describe_seconds),
            lessons_time(run),
            show_or_missing(run.stage_seconds.get("train"), describe_seconds),
            show_or_missing(run.trained_tokens),
        ]
        for run in comparison.runs
        if run.mask is not None
    ]
    header = ["run", "calibration score S (dense)", "mask evaluations", "layer forwards"]
    header += ["mask tokens", "mask time", "lessons time", "training time", "training tokens"]
    note = (
        "S: share of calibration examples with every answer token right. Lessons: what the teacher "
        "says of all packed tokens, stored once for all runs on them. Training: with its "
        "evaluations, and with a teacher that is asked at every step; without lessons."
    )
    return Table("Cost", header, rows, note)


def align(table: Table) -> list[str]:
    """The table as lines of plain text."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (table.header, *table.rows)]


# ----------------------------------------------------------------------------------------- cells


def show_step(step: int | None) -> str:
    return "dense" if step is None else str(step)


def show_ends(curve: Curve) -> str:
    """`31.2 → 88.0 (95.8)`."""
    shown = f"{curve.values[0]:.1f}" if 0 in curve.points else MISSING
    if curve.steps and curve.steps != [0]:
        shown += f" → {curve.values[-1]:.1f}"
    return f"{shown} ({MISSING if math.isnan(curve.dense) else f'{curve.dense:.1f}'})"


def show_gap_share(recovery: Recovery) -> str:
    if math.isnan(recovery.curve.dense):
        return MISSING
    if recovery.has_clear_gap and recovery.gap_share.low is None:
        return "no interval"  # which a share needs to say something
    if recovery.has_clear_gap:
        return show_estimate(recovery.gap_share, show_share)
    # "No significant gap" says nothing without how large it may be.
    gap = estimate([recovery.curve], gap_at(0))
    if gap.low is None or gap.high is None:
        return "no gap"
    half, form = (gap.high - gap.low) / 2, ".3f"
    if recovery.curve.score is not compare.LOSS:
        # Where every example has the dense model's score, resamples have it too.
        half, form = half or recovery.unseen, ".1f"
    return f"no significant gap (± {half:{form}})"


def kv_saved(run: RunResults) -> str:
    if run.mask is None:
        return MISSING
    mask, size = run.mask.mask, run.mask.model.head_dim
    # Of a run that was not trained no length is known, so one is taken at which windows matter.
    context = run.config.get("data", {}).get("sequence_length") or 16 * mask.window_tokens
    # transformers' dynamic cache of a dense model has no spare room.
    saved = 1 - mask.allocated_bytes(context, size) / mask.dense_kv_bytes(context, size)
    return f"{saved:.0%} at {context:,} tokens"


def lessons_time(run: RunResults) -> str:
    if not run.has_lessons:
        return MISSING
    seconds = run.stage_seconds.get("lessons")
    return "unknown" if seconds is None else describe_seconds(seconds)


def show_spent(spent: Spent | None) -> str:
    """`9.0e+12 FLOPs, 1.4 min`."""
    if spent is None:
        return MISSING
    text = f"{spent.flops:.1e} FLOPs, {describe_seconds(3600 * spent.hours)}"
    return f"{text}, and lessons, whose cost is unknown" if spent.lacks_lessons else text


def calibration_score(run: RunResults) -> str:
    """The score S of the mask and, in parentheses, of the dense model: `0.83 (0.98)`."""
    records = (run.mask_cost.get(name) for name in ("hybrid", "dense"))
    values = [record.get("accuracy") if isinstance(record, dict) else None for record in records]
    hybrid, dense = (f"{v:.2f}" if isinstance(v, int | float) else MISSING for v in values)
    return MISSING if hybrid == MISSING else f"{hybrid} ({dense})"


show_points = "{:.1f}".format
show_change = "{:+z.1f}".format  # points; z: no -0.0
show_share = "{:z.0%}".format


def show_tokens(count: float | None) -> str:
    """`1.25M`."""
    if count is None or count == NEVER:
        return MISSING if count is None else "not reached"
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def show_estimate(estimate: Estimate, write: Callable[[float], str]) -> str:
    """`62% [41%, 80%]`."""
    if estimate.value is None:
        return MISSING
    text = write(estimate.value)
    if estimate.low is None or estimate.high is None:
        return text
    # An interval that rounds to the number itself would only repeat it.
    low, high = write(estimate.low), write(estimate.high)
    return text if low == high == text else f"{text} [{low}, {high}]"


def show_difference(score: ReportedScore, estimate: Estimate) -> str:
    """`+8.1 [+3.1, +12.8]* (3)`: excludes zero, three seeds."""
    if estimate.value is None:
        return MISSING
    seeds = "1 seed" if estimate.num_seeds == 1 else str(estimate.num_seeds)
    low, high = estimate.low, estimate.high
    star = "*" if low is not None and high is not None and (low > 0 or high < 0) else ""
    write = "{:+.3f}".format if score is compare.LOSS else show_change
    return f"{show_estimate(estimate, write)}{star} ({seeds})"


def show_score(point: Point | None) -> str:
    if point is None:
        return MISSING
    error = "" if math.isnan(point.stderr) else f" ± {point.stderr:.1f}"
    return f"{point.value:.1f}{error}"


def show_or_missing(value: Any, write: Callable[[Any], str] = "{:,.0f}".format) -> str:
    """A number as `write` has it, a count unless it says otherwise. What a damaged file has in the
    place of a number is missing too."""
    return write(value) if isinstance(value, int | float) else MISSING
