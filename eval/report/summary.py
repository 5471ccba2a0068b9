"""In words: one run's story for the terminal (its mask, what that costs on the calibration set and
saves in the cache, its scores on the way back), and what to know before a comparison's numbers."""

from collections.abc import Iterator

from rich.text import Text

from bosch.eval.report.cells import MISSING, show_change, show_estimate, show_share, show_tokens
from bosch.eval.report.compare import Comparison, beside_baseline, end_alike, falls, recoveries
from bosch.eval.report.measures import SUITES
from bosch.eval.report.runs import RunResults
from bosch.eval.report.statistics import Curve
from bosch.eval.report.tables import align, calibration_score, course_table, kv_saved
from bosch.masks.picture import mask_lines, mask_title


def summarize(comparison: Comparison) -> Iterator[str | Text]:
    """Of the comparison's only run."""
    (run,) = comparison.runs
    if run.mask is not None:
        yield f"mask: {mask_title(run.mask)}; ## full, :: window, share windowed"
        yield from mask_lines(run.mask)
        yield f"KV bytes saved: {kv_saved(run)}"
        if (score := calibration_score(run)) != MISSING:
            yield f"S, calibration examples answered right (dense): {score}"
    yield from align(course_table(comparison, run))
    for found in recoveries(comparison):
        suite, share = SUITES[found.measure.suite], found.gap_share
        if share.value is not None and not found.has_clear_gap:
            yield f"{suite}: step 0 is not surely below the dense model: no gap to close"
        else:
            yield f"{suite}: gap to the dense model closed {show_estimate(share, show_share)}"


def warnings(comparison: Comparison) -> list[str]:
    """What a reader must know before the numbers: parts that are missing, checkpoints that are
    worse than step 0 (in an average, or clearly)."""
    lines = [f"{run.name}: {problem}" for run in comparison.runs for problem in run.problems]
    lacking: dict[str, list[str]] = {}
    for run in comparison.runs:
        for part in missing_parts(comparison, run):
            lacking.setdefault(part, []).append(run.name)
    lines += [f"{', '.join(names)}: {part}" for part, names in lacking.items()]
    lines += unlike_examples(comparison)
    lines += unlike_ends(comparison)
    if comparison.baseline and len(comparison.runs) > 1 and not beside_baseline(comparison):
        lines.append(f"{comparison.baseline}: without its step 0 no run is measured against it")
    for fall in falls(comparison):
        if fall.is_clear or fall.measure.kind == "average":
            lines.append(
                f"{fall.run}: {fall.measure.full_title} at step {fall.step} is below step 0: "
                f"{show_estimate(fall.points, show_change)} points"
                + ("" if fall.is_clear else f", {fall.certainty}")
            )
    return lines


def missing_parts(comparison: Comparison, run: RunResults) -> list[str]:
    if run.mask is None:
        return ["no mask yet"]
    curves = [curve for m in comparison.measures if (curve := comparison.curve(run.name, m))]
    if not curves and not run.rows:
        return ["not evaluated yet"]
    parts = []
    if not any(row["step"] is None for row in run.rows):
        parts.append("the dense model was not evaluated, so there is no gap to close")
    if not any(curve.starts_at_zero for curve in curves):
        parts.append("step 0 was not evaluated")
    elif not any(curve.is_trained for curve in curves):
        parts.append("evaluated before training only")
    for measure in comparison.averages:
        curve = comparison.curve(run.name, measure)
        if run.ratio and curve and curve.is_trained and curve.dense <= curve.values[0]:
            parts.append(f"{measure.title}: step 0 is not below the dense model: no gap to close")
    return parts


def unlike_examples(comparison: Comparison) -> list[str]:
    """Averages that rest on other examples in some runs than in others."""
    lines = []
    for measure in comparison.averages:
        found: dict[str, list[str]] = {}
        for run in comparison.runs:
            rows = [row for row in run.rows if row["suite"] == measure.suite]
            lengths = ", ".join(map(str, sorted({r["length"] for r in rows if r["length"]})))
            for n in sorted({row["n"] for row in rows if row["task"] == measure.name}):
                test_set = f"{n} of {lengths} tokens" if lengths else str(n)
                found.setdefault(test_set, []).append(run.name)
        if len(found) > 1:
            told = "; ".join(f"{name} in {', '.join(runs)}" for name, runs in found.items())
            lines.append(f"{measure.title}: not the same examples everywhere: {told}")
    return lines


def unlike_ends(comparison: Comparison) -> list[str]:
    """Trainings of which some have come further than others."""
    ends: dict[float, dict[str, Curve]] = {}
    for row in recoveries(comparison):
        for end, members in ends.items():
            if end_alike(row.curve, next(iter(members.values()))):
                ends[end][row.run] = row.curve
                break
        else:
            ends[float(row.curve.tokens[-1])] = {row.run: row.curve}
    if len(ends) < 2:
        return []
    told = "; ".join(f"{show_tokens(end)} in {', '.join(names)}" for end, names in ends.items())
    return [f"not the same tokens at the end: {told}"]
