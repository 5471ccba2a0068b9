"""Runs side by side: their curves, how far and fast each recovers, where one falls below step 0.

`compare` reads run folders into one `Comparison`; eval/report/page.py shows it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bosch.masks.overlap import jaccard_distance
from bosch.plugins import suggest
from eval.report import recovery
from eval.report.measures import ROUNDING, Measure, Row, Score, find_measures, score
from eval.report.recovery import Curve, Estimate, estimate, estimate_difference
from eval.report.resampling import Samples, draw_from_errors, resample_examples
from eval.report.runs import RunResults, read_runs


@dataclass(frozen=True)
class Comparison:
    runs: Sequence[RunResults]
    measures: Sequence[Measure]  # those that any run was judged by
    curves: Mapping[tuple[str, str, str], Curve]  # by run, suite and measure
    dense: Mapping[tuple[str, str, str], Score]  # alike; the dense model of the run
    baseline: str | None = None  # name of the run that others are measured against

    def curve(self, run: str, measure: Measure) -> Curve | None:
        return self.curves.get((run, measure.suite, measure.name))

    @property
    def averages(self) -> list[Measure]:
        return [measure for measure in self.measures if measure.kind == "average"]


@dataclass(frozen=True)
class Recovery:
    """One run's row in the table of how far and how fast."""

    run: str
    measure: Measure
    curve: Curve
    gap_share: Estimate  # of the gap to the dense model, closed at the end
    tokens_to_half: Estimate
    tokens_to_90: Estimate
    mean_score: Estimate  # area under the curve over its width
    end_beside_baseline: Estimate | None = None  # points more than the baseline at the end
    mean_beside_baseline: Estimate | None = None

    @property
    def has_clear_gap(self) -> bool:
        """Whether there is surely something to win back: where there is not, the share of it is not
        defined for some of the examples drawn anew, and of any size for others."""
        return self.curve.replicates is None or self.gap_share.low is not None


@dataclass(frozen=True)
class Fall:
    """A checkpoint that is worse than step 0."""

    run: str
    measure: Measure
    step: int
    points: Estimate  # negative

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes that nothing was lost."""
        return self.points.excludes_zero

    @property
    def certainty(self) -> str:
        if self.points.low is None:
            return "error unknown"
        return "clear" if self.is_clear else "within noise"


@dataclass(frozen=True)
class KindMean:
    """Runs that differ in the seed only, together."""

    kind: str
    runs: Sequence[str]
    values: Sequence[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def stderr(self) -> float | None:
        if len(self.values) < 2:
            return None
        return statistics.stdev(self.values) / math.sqrt(len(self.values))


def compare(folders: Sequence[Path], baseline: str | None = None) -> Comparison:
    """`baseline`: the name of a run among the folders, or its path."""
    runs = read_runs(folders)
    name = None if baseline is None else _find_baseline(baseline, runs)
    measures: list[Measure] = []
    curves: dict[tuple[str, str, str], Curve] = {}
    dense: dict[tuple[str, str, str], Score] = {}
    for run in runs:
        for measure in find_measures(run.rows):
            if (measure.suite, measure.name) not in {(m.suite, m.name) for m in measures}:
                measures.append(measure)
            key = (run.name, measure.suite, measure.name)
            if curve := make_curve(run, measure):
                curves[key] = curve
            if found := score(measure, [row for row in run.rows if row["step"] is None]):
                dense[key] = found
    measures.sort(key=lambda measure: measure.suite != "niah")  # stable: the rest as it came
    return Comparison(runs, measures, curves, dense, name)


def make_curve(run: RunResults, measure: Measure) -> Curve | None:
    """The measure at every step it was evaluated at. None: at none, or tokens are unknown."""
    by_step: dict[int | None, list[Row]] = {}
    for row in run.rows:
        if row["suite"] == measure.suite:
            by_step.setdefault(row["step"], []).append(row)
    found: dict[int, tuple[float, Score]] = {}
    for step, rows in by_step.items():
        value = score(measure, rows)
        if step is not None and value is not None and rows[0]["tokens"] is not None:
            found[step] = (rows[0]["tokens"], value)
    if not found:
        return None
    steps = tuple(sorted(found))
    dense = score(measure, by_step.get(None, []))
    curve = Curve(
        steps,
        np.array([found[step][0] for step in steps], float),
        np.array([found[step][1].value for step in steps]),
        np.array([found[step][1].stderr for step in steps]),
        math.nan if dense is None else dense.value,
        math.nan if dense is None else dense.stderr,
    )
    return add_replicates(curve, run, measure)


def add_replicates(curve: Curve, run: RunResults, measure: Measure) -> Curve:
    """From the scores of single examples where they give the curve that the suite wrote, else from
    standard errors, else none."""
    points = [run.samples.get((step, measure.suite), {}) for step in curve.steps]
    has_dense = not math.isnan(curve.dense)
    dense = run.samples.get((None, measure.suite), {}) if has_dense else None
    if measure.weights and _agree(curve, points, dense, measure):
        paired = resample_examples(points, dense, measure.weights, measure.suite)
        if paired is not None:
            return replace(curve, replicates=paired)
    title = f"{measure.suite}/{measure.name}"
    drawn = draw_from_errors(
        curve.values, curve.stderrs, curve.dense, curve.dense_stderr, title, run.name
    )
    return replace(curve, replicates=drawn)


def recoveries(comparison: Comparison) -> list[Recovery]:
    """A row for each run and average that was trained and evaluated at step 0 and later."""
    rows = []
    for measure in comparison.averages:
        trained = {
            run.name: curve
            for run in comparison.runs
            if (curve := comparison.curve(run.name, measure)) and curve.is_trained
        }
        between = common_stretch(list(trained.values()))
        base = trained.get(comparison.baseline or "")
        for name, curve in trained.items():
            row = Recovery(
                name,
                measure,
                curve,
                estimate(curve, recovery.gap_share),
                estimate(curve, recovery.tokens_to_share(curve.tokens, 0.5)),
                estimate(curve, recovery.tokens_to_share(curve.tokens, 0.9)),
                estimate(curve, recovery.mean_score(curve.tokens, *between)),
            )
            if base is not None and name != comparison.baseline:
                row = replace(row, mean_beside_baseline=_mean_difference(curve, base, between))
                if end_alike(curve, base):
                    points = estimate_difference(curve, base, recovery.final_value)
                    row = replace(row, end_beside_baseline=points)
            rows.append(row)
    return rows


def beside_baseline(comparison: Comparison) -> dict[tuple[str, Measure], Estimate]:
    """Points more than the baseline before training, by run and average."""
    found = {}
    for measure in comparison.averages:
        base = comparison.curve(comparison.baseline or "", measure)
        for run in comparison.runs:
            curve = comparison.curve(run.name, measure)
            if base is None or curve is None or run.name == comparison.baseline:
                continue
            if base.starts_at_zero and curve.starts_at_zero:
                points = estimate_difference(curve, base, recovery.first_value)
                found[run.name, measure] = points
    return found


def falls(comparison: Comparison) -> list[Fall]:
    """Every checkpoint below step 0, averages first, clear ones before those within noise."""
    found = []
    for run in comparison.runs:
        for measure in comparison.measures:
            curve = comparison.curve(run.name, measure)
            if curve is None or not curve.starts_at_zero:
                continue
            for place, step in enumerate(curve.steps[1:], 1):
                if curve.values[place] < curve.values[0] - 1e-9:
                    points = estimate(_up_to(curve, place), recovery.gain)
                    found.append(Fall(run.name, measure, step, points))
    return sorted(found, key=lambda fall: (fall.measure.kind, not fall.is_clear))


def kind_means(comparison: Comparison, measure: Measure, at_end: bool) -> list[KindMean]:
    """Scores of runs that differ in the seed only, at step 0 or at the end of training. The end is
    where the furthest of them is; others are left out."""
    groups: dict[str, dict[str, Curve]] = {}
    for run in comparison.runs:
        curve = comparison.curve(run.name, measure)
        if curve is None or not curve.starts_at_zero or (at_end and not curve.is_trained):
            continue
        groups.setdefault(run.kind, {})[run.name] = curve
    means = []
    for kind, curves in groups.items():
        furthest = max(curves.values(), key=lambda curve: float(curve.tokens[-1]))
        kept = {n: c for n, c in curves.items() if not at_end or end_alike(c, furthest)}
        values = [float(curve.values[-1 if at_end else 0]) for curve in kept.values()]
        means.append(KindMean(kind, list(kept), values))
    return means


def end_alike(first: Curve, second: Curve) -> bool:
    """Whether two trainings have come as far. A learned mask's share of the tokens ends with a
    step, so that the sums may differ by some tokens."""
    ends = (float(first.tokens[-1]), float(second.tokens[-1]))
    return math.isclose(*ends, rel_tol=0.01)


def jaccard_table(runs: Sequence[RunResults]) -> list[list[float | None]]:
    """Jaccard distances of the runs' windowed groups. None: no mask, or of another shape."""
    return [[_distance(first, second) for second in runs] for first in runs]


def _distance(first: RunResults, second: RunResults) -> float | None:
    if first.mask is None or second.mask is None:
        return None
    a, b = first.mask.mask, second.mask.mask
    if (a.num_layers, a.num_groups) != (b.num_layers, b.num_groups):
        return None
    return jaccard_distance(a, b)


def _up_to(curve: Curve, place: int) -> Curve:
    """The curve as if training had ended at that point."""
    drawn = curve.replicates
    return replace(
        curve,
        steps=curve.steps[: place + 1],
        tokens=curve.tokens[: place + 1],
        values=curve.values[: place + 1],
        stderrs=curve.stderrs[: place + 1],
        replicates=replace(drawn, values=drawn.values[:, : place + 1]) if drawn else None,
    )


def common_stretch(curves: Sequence[Curve]) -> tuple[float, float]:
    """The tokens until which, and those since which, all have scores: means over unlike stretches
    would say nothing of runs. One that learned its mask begins with the tokens that took."""
    until = min((float(curve.tokens[-1]) for curve in curves), default=0.0)
    return until, max((float(curve.tokens[0]) for curve in curves), default=0.0)


def _mean_difference(curve: Curve, base: Curve, between: tuple[float, float]) -> Estimate:
    """Runs may have been evaluated at other tokens, so each has a statistic of its own."""
    own, other = (recovery.mean_score(c.tokens, *between) for c in (curve, base))
    return recovery.estimate_pair(curve, own, base, other)


def _agree(
    curve: Curve, points: Sequence[Samples], dense: Samples | None, measure: Measure
) -> bool:
    """Whether the examples' scores give what the suite wrote."""
    told = list(zip(curve.values, points, strict=True))
    if dense is not None:
        told.append((np.float64(curve.dense), dense))
    for value, samples in told:
        if any(not samples.get(cell) for cell in measure.weights):
            return False
        means = {cell: statistics.fmean(samples[cell].values()) for cell in measure.weights}
        if abs(sum(w * means[cell] for cell, w in measure.weights.items()) - value) > ROUNDING:
            return False
    return True


def _find_baseline(asked: str, runs: Sequence[RunResults]) -> str:
    for run in runs:
        if asked == run.name or Path(asked).resolve() == run.path.resolve():
            return run.name
    names = [run.name for run in runs]
    raise ValueError(f"--baseline {asked}: it is none of the runs; {suggest(asked, names)}")
