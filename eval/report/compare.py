"""Runs side by side: their curves, how far and fast each recovers, where one falls below step 0,
what each kind has over a baseline.

`compare` reads runs into one `Comparison`; eval/report/page.py shows it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from bosch.eval.report import statistics
from bosch.eval.report.archive import read_runs
from bosch.eval.report.measures import ROUNDING, Measure, Row, Score, find_measures, score
from bosch.eval.report.runs import RunResults
from bosch.eval.report.statistics import (
    Curve,
    Estimate,
    Replicates,
    Samples,
    estimate,
    estimate_difference,
    resample_examples,
)
from bosch.masks.overlap import jaccard_distance
from bosch.plugins import suggest
from bosch.run.errors import UserError


@dataclass(frozen=True)
class Comparison:
    runs: Sequence[RunResults]
    measures: Sequence[Measure]  # those that any run was judged by
    curves: Mapping[tuple[str, str, str], Curve]  # by run, suite and measure
    dense: Mapping[tuple[str, str, str], Score]  # alike; the dense model of the run
    baseline: str | None = None  # a run's name or a method: others are measured against it

    def curve(self, run: str, measure: Measure) -> Curve | None:
        return self.curves.get((run, measure.suite, measure.name))

    def dense_score(self, run: str, measure: Measure) -> Score | None:
        return self.dense.get((run, measure.suite, measure.name))

    @property
    def averages(self) -> list[Measure]:
        return [measure for measure in self.measures if measure.kind == "average"]

    @property
    def variants(self) -> list[Measure]:
        return [measure for measure in self.measures if measure.kind == "variant"]


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

    @property
    def has_clear_gap(self) -> bool:
        """Whether there is surely something to win back: where there is not, the share of it is not
        defined for some of the examples drawn anew, and of any size for others."""
        return self.curve.replicates is None or self.gap_share.low is not None


@dataclass(frozen=True)
class Advantage:
    """Points that runs of one kind have over the baseline's, in the mean over their seeds. None:
    not evaluated, or not trained as far."""

    kind: str  # or the run's name, where the baseline is one run
    measure: Measure
    start: Estimate | None  # before training
    end: Estimate | None  # after it
    mean: Estimate | None  # of the mean score on the way


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
        return fmean(self.values)

    @property
    def stderr(self) -> float:
        """nan for one run."""
        many = len(self.values) > 1
        return stdev(self.values) / math.sqrt(len(self.values)) if many else math.nan


def compare(given: Sequence[Path | RunResults], baseline: str | None = None) -> Comparison:
    """`given`: run folders, and files that `sweep.py --rows` keeps. `baseline`: a method, or the
    name or folder of one of the runs."""
    runs = read_runs(given)
    name = None if baseline is None else _find_baseline(baseline, runs)
    measures: dict[tuple[str, str], Measure] = {}
    curves: dict[tuple[str, str, str], Curve] = {}
    dense: dict[tuple[str, str, str], Score] = {}
    for run in runs:
        rows = [*run.rows, *run.variants]
        for measure in find_measures(rows):
            measures.setdefault((measure.suite, measure.name), measure)
            key = (run.name, measure.suite, measure.name)
            if curve := _make_curve(run, rows, measure):
                curves[key] = curve
            if found := score(measure, [row for row in rows if row["step"] is None]):
                dense[key] = found
    ordered = sorted(measures.values(), key=lambda measure: measure.suite != "niah")  # stable
    return Comparison(runs, ordered, curves, dense, name)


def _make_curve(run: RunResults, rows: Sequence[Row], measure: Measure) -> Curve | None:
    """The measure at every step it was evaluated at. None: at none, or tokens are unknown."""
    by_step: dict[int | None, list[Row]] = {}
    for row in rows:
        if row["suite"] == measure.suite:
            by_step.setdefault(row["step"], []).append(row)
    found: dict[int, tuple[float, Score]] = {}
    for step, own in by_step.items():
        value = score(measure, own)
        if step is not None and value is not None and own[0]["tokens"] is not None:
            found[step] = (own[0]["tokens"], value)
    if not found:
        return None
    steps = tuple(sorted(found))
    dense = score(measure, by_step.get(None, []))
    return Curve(
        steps,
        np.array([found[step][0] for step in steps], float),
        np.array([found[step][1].value for step in steps]),
        np.array([found[step][1].stderr for step in steps]),
        math.nan if dense is None else dense.value,
        _replicate(run, measure, {step: found[step][1] for step in steps}, dense),
    )


def _replicate(
    run: RunResults, measure: Measure, scores: Mapping[int, Score], dense: Score | None
) -> Replicates | None:
    """None where single examples are not known, or do not give what the suite wrote."""
    told: list[tuple[int | None, Score]] = [*scores.items(), *([(None, dense)] if dense else [])]
    samples = [run.samples.get((step, measure.suite, measure.condition), {}) for step, _ in told]
    if not all(_agrees(measure, one, told[place][1]) for place, one in enumerate(samples)):
        return None
    points, last = samples[: len(scores)], samples[-1] if dense else None
    return resample_examples(points, last, measure.weights, measure.suite)


def _agrees(measure: Measure, samples: Samples, told: Score) -> bool:
    if not measure.weights or any(not samples.get(cell) for cell in measure.weights):
        return False
    means = {cell: fmean(samples[cell].values()) for cell in measure.weights}
    return abs(sum(w * means[cell] for cell, w in measure.weights.items()) - told.value) <= ROUNDING


def _trained(comparison: Comparison, measure: Measure) -> dict[str, Curve]:
    """Curves of the runs that were trained and evaluated at step 0 and later."""
    found = {run.name: comparison.curve(run.name, measure) for run in comparison.runs}
    return {name: curve for name, curve in found.items() if curve and curve.is_trained}


def _mean_score(trained: Mapping[str, Curve]) -> statistics.Statistic:
    """Over the tokens that all have: means over unlike stretches would say nothing of runs. One
    that learned its mask begins with the tokens that took."""
    until = min((float(curve.tokens[-1]) for curve in trained.values()), default=0.0)
    since = max((float(curve.tokens[0]) for curve in trained.values()), default=0.0)
    return statistics.mean_score(until, since)


def recoveries(comparison: Comparison) -> list[Recovery]:
    """A row for each run and average that was trained and evaluated at step 0 and later."""
    rows = []
    for measure in comparison.averages:
        trained = _trained(comparison, measure)
        mean_score = _mean_score(trained)
        rows += [
            Recovery(
                name,
                measure,
                curve,
                estimate(curve, statistics.gap_share),
                estimate(curve, statistics.tokens_to_share(0.5)),
                estimate(curve, statistics.tokens_to_share(0.9)),
                estimate(curve, mean_score),
            )
            for name, curve in trained.items()
        ]
    return rows


def beside_baseline(comparison: Comparison) -> list[Advantage]:
    """What each kind of runs has over the baseline's, by average and kind."""
    found = []
    paired = pair_runs(comparison)
    for measure in [*comparison.averages, *comparison.variants]:
        mean_score = _mean_score(_trained(comparison, measure))
        for kind, names in paired.items():
            pairs = [
                (own, base)
                for run, other in names
                if (own := comparison.curve(run, measure))
                and (base := comparison.curve(other, measure))
            ]
            begun = [(a, b) for a, b in pairs if a.starts_at_zero and b.starts_at_zero]
            trained = [(a, b) for a, b in begun if a.is_trained and b.is_trained]
            ended = [(a, b) for a, b in trained if end_alike(a, b)]
            if begun:
                row = Advantage(
                    kind,
                    measure,
                    estimate_difference(begun, statistics.first_value),
                    estimate_difference(ended, statistics.final_value) if ended else None,
                    estimate_difference(trained, mean_score) if trained else None,
                )
                found.append(row)
    return found


def pair_runs(comparison: Comparison) -> dict[str, list[tuple[str, str]]]:
    """Runs and the baseline's run beside each, by kind: of the same model, ratio, window and seed
    where the baseline is a method; where it is a run, every other is a kind of its own."""
    asked = comparison.baseline
    if any(run.name == asked for run in comparison.runs):
        return {r.name: [(r.name, str(asked))] for r in comparison.runs if r.name != asked}
    pairs: dict[str, list[tuple[str, str]]] = {}
    for run in comparison.runs:
        alike = [
            base
            for base in comparison.runs
            if base.method == asked and base.setting == run.setting and run.method != asked
        ]
        if alike:
            # Of several the one that differs in the same other settings.
            base = next((base for base in alike if base.apart == run.apart), alike[0])
            pairs.setdefault(run.kind, []).append((run.name, base.name))
    return pairs


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
                    points = estimate(curve, statistics.gain_to(place))
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
    return math.isclose(float(first.tokens[-1]), float(second.tokens[-1]), rel_tol=0.01)


def mask_distance(first: RunResults, second: RunResults) -> float | None:
    """Jaccard distance of the windowed groups. None: no mask, or of another shape."""
    if first.mask is None or second.mask is None:
        return None
    a, b = first.mask.mask, second.mask.mask
    if (a.num_layers, a.num_groups) != (b.num_layers, b.num_groups):
        return None
    return jaccard_distance(a, b)


def _find_baseline(asked: str, runs: Sequence[RunResults]) -> str:
    for run in runs:
        if asked == run.name or Path(asked).resolve() == run.path.resolve():
            return run.name
    methods = sorted({run.method for run in runs})  # without options before those with some
    for method in methods:
        if asked in (method, method.split()[0]):
            return method
    names = [*methods, *(run.name for run in runs)]
    raise UserError(
        f"--baseline {asked}: it is none of the methods or runs; {suggest(asked, names)}"
    )
