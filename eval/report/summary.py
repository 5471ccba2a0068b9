"""Results in words: the summary of one run for the terminal, and the warnings of a comparison."""

import math
from collections.abc import Iterator

from rich.text import Text

from bosch.eval.report.cells import MISSING, show_change, show_estimate, show_share, show_tokens
from bosch.eval.report.compare import (
    Comparison,
    Recovery,
    baseline_differences,
    end_together,
    find_drops,
    recoveries,
)
from bosch.eval.report.runs import RunResults
from bosch.eval.report.scores import read_value
from bosch.eval.report.statistics import Curve
from bosch.eval.report.tables import align, calibration_score, checkpoint_table, kv_saved
from bosch.eval.suites._reporting import reporting_of
from bosch.masks.picture import mask_lines, mask_title


def summarize(comparison: Comparison) -> Iterator[str | Text]:
    """The comparison's only run: its mask, what it costs and saves, and the scores of every
    checkpoint."""
    (run,) = comparison.runs
    if run.mask is not None:
        yield f"mask: {mask_title(run.mask)}; ## full, :: window, share windowed"
        yield from mask_lines(run.mask)
        yield f"KV bytes saved: {kv_saved(run)}"
        if (score := calibration_score(run)) != MISSING:
            yield f"calibration questions answered right (dense model): {score}"
    yield from align(checkpoint_table(comparison, run))
    yield from map(describe_recovery, recoveries(comparison))


def describe_recovery(recovery: Recovery) -> str:
    title = reporting_of(recovery.score.suite).title
    if math.isnan(recovery.curve.dense):
        return f"{title}: the dense model was not evaluated"
    if recovery.gap_share.value is None:
        return f"{title}: no gap to recover, step 0 is not below the dense model"
    if not recovery.has_clear_gap:
        return f"{title}: no significant gap to recover"
    share = show_estimate(recovery.gap_share, show_share)
    return f"{title}: recovered {share} of the gap to the dense model"


def warnings(comparison: Comparison) -> list[str]:
    """What a reader must know before the numbers: missing parts, runs that are not comparable, and
    checkpoints below step 0 (any in an average, significant ones in a part)."""
    lines = [f"{run.name}: {problem}" for run in comparison.runs for problem in run.problems]
    runs_lacking: dict[str, list[str]] = {}
    for run in comparison.runs:
        for part in missing_parts(comparison, run):
            runs_lacking.setdefault(part, []).append(run.name)
    lines += [f"{', '.join(names)}: {part}" for part, names in runs_lacking.items()]
    lines += different_examples(comparison)
    lines += different_ends(comparison)
    if comparison.baseline and len(comparison.runs) > 1 and not baseline_differences(comparison):
        lines.append(f"{comparison.baseline}: not evaluated at step 0, so no run is compared to it")
    for drop in find_drops(comparison):
        if drop.is_significant or drop.score.kind == "average":
            lines.append(
                f"{drop.run}: {drop.score.full_title} at step {drop.step} is below step 0: "
                f"{show_estimate(drop.points, show_change)} points"
                + ("" if drop.is_significant else f", {drop.certainty}")
            )
    return lines


def missing_parts(comparison: Comparison, run: RunResults) -> list[str]:
    if run.mask is None:
        return ["no mask yet"]
    curves = [curve for s in comparison.scores if (curve := comparison.curve(run.name, s))]
    if not curves and not run.rows:
        return ["not evaluated yet"]
    parts = []
    if not any(row["step"] is None for row in run.rows):
        parts.append("the dense model was not evaluated, so the gap to it is unknown")
    if not any(curve.starts_at_zero for curve in curves):
        parts.append("step 0 was not evaluated")
    elif not any(curve.is_trained for curve in curves):
        parts.append("evaluated only before training")
    for score in comparison.averages:
        curve = comparison.curve(run.name, score)
        if run.ratio and curve and curve.is_trained and curve.dense <= curve.values[0]:
            parts.append(f"{score.title}: no gap to recover, step 0 is not below the dense model")
    return parts


def different_examples(comparison: Comparison) -> list[str]:
    """Averages that some runs were evaluated for on other examples than the rest."""
    lines = []
    for score in comparison.averages:
        test_sets: dict[str, list[str]] = {}
        for run in comparison.runs:
            rows = [row for row in run.rows if row["suite"] == score.suite]
            lengths = ", ".join(map(str, sorted({r["length"] for r in rows if r["length"]})))
            steps = {row["step"] for row in rows}
            values = [read_value(score, [r for r in rows if r["step"] == step]) for step in steps]
            for n in sorted({value.n for value in values if value}):
                test_set = f"{n} of {lengths} tokens" if lengths else str(n)
                test_sets.setdefault(test_set, []).append(run.name)
        if len(test_sets) > 1:
            listed = "; ".join(f"{name} in {', '.join(runs)}" for name, runs in test_sets.items())
            lines.append(f"{score.title}: runs were evaluated on different examples: {listed}")
    return lines


def different_ends(comparison: Comparison) -> list[str]:
    """Runs that were trained on different numbers of tokens."""
    ends: dict[float, dict[str, Curve]] = {}
    for recovery in recoveries(comparison):
        for end, members in ends.items():
            if end_together(recovery.curve, next(iter(members.values()))):
                ends[end][recovery.run] = recovery.curve
                break
        else:
            ends[float(recovery.curve.tokens[-1])] = {recovery.run: recovery.curve}
    if len(ends) < 2:
        return []
    listed = "; ".join(f"{show_tokens(end)} in {', '.join(names)}" for end, names in ends.items())
    return [f"runs were trained on different numbers of tokens: {listed}"]
