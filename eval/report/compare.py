"""Runs side by side: their curves, how far and fast each recovers, checkpoints below step 0, and
differences from a baseline.

`compare` reads runs into one `Comparison`; eval/report/page.py shows it.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from bosch.config import parse_count
from bosch.eval.report import statistics
from bosch.eval.report.archive import read_runs
from bosch.eval.report.runs import RunResults
from bosch.eval.report.scores import ScoreValue, find_scores, read_value, sort_by_suite
from bosch.eval.report.statistics import (
    Curve,
    Estimate,
    Replicates,
    Samples,
    estimate,
    estimate_difference,
    resample_examples,
)
from bosch.eval.suites._reporting import ReportedScore, Row
from bosch.plugins import suggest
from bosch.run.errors import UserError
from bosch.run.stage import flatten

# The suites round a task's percent to two decimals before they average.
ROUNDING = 0.02
TOLERANCE = 2.0  # points below the dense model that a recovered model may be


@dataclass(frozen=True)
class Comparison:
    runs: Sequence[RunResults]
    scores: Sequence[ReportedScore]  # of any run, suite by suite
    curves: Mapping[tuple[str, str, str], Curve]  # by run, suite and score
    dense: Mapping[tuple[str, str, str], ScoreValue]  # the same of each run's dense model
    baseline: str | None = None  # a run's name, a method, or settings: train.objective=next-token

    def curve(self, run: str, score: ReportedScore) -> Curve | None:
        return self.curves.get((run, score.suite, score.name))

    def curves_of(self, score: ReportedScore) -> list[tuple[RunResults, Curve]]:
        """Of the runs that have one."""
        found = ((run, self.curve(run.name, score)) for run in self.runs)
        return [(run, curve) for run, curve in found if curve]

    def dense_value(self, run: str, score: ReportedScore) -> ScoreValue | None:
        return self.dense.get((run, score.suite, score.name))

    @property
    def suites(self) -> list[str]:
        return list(dict.fromkeys(score.suite for score in self.scores))

    @property
    def averages(self) -> list[ReportedScore]:
        return [score for score in self.scores if score.kind == "average"]

    @property
    def variants(self) -> list[ReportedScore]:
        return [score for score in self.scores if score.kind == "variant"]

    def parts(self, suite: str) -> list[ReportedScore]:
        return [score for score in self.scores if score.kind == "part" and score.suite == suite]


@dataclass(frozen=True)
class Recovery:
    """How far and how fast one score of one run recovers."""

    run: str
    score: ReportedScore
    curve: Curve
    gap_share: Estimate  # share of the gap to the dense model that is recovered at the end
    tokens_to_half: Estimate
    tokens_to_90: Estimate
    mean_score: Estimate  # area under the curve divided by its width

    @property
    def has_clear_gap(self) -> bool:
        """Whether step 0 is significantly below the dense model. If not, the share is undefined for
        some of the resamples and arbitrary for others."""
        return self.curve.replicates is None or self.gap_share.low is not None


@dataclass(frozen=True)
class BaselineDifference:
    """Points above the baseline, averaged over seeds. None: not evaluated, or not trained as
    far."""

    setup: str  # of the runs; the run's name where the baseline is one run
    score: ReportedScore
    start: Estimate | None  # before training
    end: Estimate | None  # after training
    mean: Estimate | None  # of the mean score


@dataclass(frozen=True)
class Drop:
    """A checkpoint that is worse than step 0."""

    run: str
    score: ReportedScore
    step: int
    points: Estimate  # negative


@dataclass(frozen=True)
class SeedMean:
    """The mean of a score over runs that differ only in the seed."""

    setup: str
    runs: Sequence[RunResults]
    curves: Sequence[Curve]  # of the runs
    place: int  # of the value in its curve

    @property
    def values(self) -> list[float]:
        return [float(curve.values[self.place]) for curve in self.curves]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def stderr(self) -> float:
        """nan for one run."""
        many = len(self.values) > 1
        return stdev(self.values) / math.sqrt(len(self.values)) if many else math.nan


def compare(given: Sequence[Path | RunResults], baseline: str | None = None) -> Comparison:
    """`given`: run folders, and files written by `sweep.py --rows`. `baseline`: a method, the name
    or folder of one of the runs, or the settings of some (`window=64,train.trained=all`)."""
    runs = read_runs(given)
    name = None if baseline is None else _find_baseline(baseline, runs)
    scores: dict[tuple[str, str], ReportedScore] = {}
    curves: dict[tuple[str, str, str], Curve] = {}
    dense: dict[tuple[str, str, str], ScoreValue] = {}
    for run in runs:
        rows = [*run.rows, *run.variants]
        for score in find_scores(rows):
            scores.setdefault((score.suite, score.name), score)
            key = (run.name, score.suite, score.name)
            if curve := _make_curve(run, rows, score):
                curves[key] = curve
            if value := read_value(score, [row for row in rows if row["step"] is None]):
                dense[key] = value
    return Comparison(runs, sort_by_suite(scores.values()), curves, dense, name)


def _make_curve(run: RunResults, rows: Sequence[Row], score: ReportedScore) -> Curve | None:
    """The score at every step where it was evaluated. None: at none, or tokens are unknown."""
    by_step: dict[Any, list[Row]] = {}  # None: the dense model
    for row in rows:
        if row["suite"] == score.suite:
            by_step.setdefault(row["step"], []).append(row)
    dense = read_value(score, by_step.pop(None, []))
    values: dict[int, ScoreValue] = {}
    for step, members in sorted(by_step.items()):
        value = read_value(score, members)
        if value is not None and members[0]["tokens"] is not None:
            values[step] = value
    if not values:
        return None
    return Curve(
        tuple(values),
        np.array([by_step[step][0]["tokens"] for step in values], float),
        np.array([value.value for value in values.values()]),
        np.array([value.stderr for value in values.values()]),
        math.nan if dense is None else dense.value,
        _replicate(run, score, values, dense),
    )


def _replicate(
    run: RunResults,
    score: ReportedScore,
    values: Mapping[int, ScoreValue],
    dense: ScoreValue | None,
) -> Replicates | None:
    """None where predictions are missing or do not reproduce the suite's own numbers."""
    models: dict[Any, ScoreValue] = {**values, **({None: dense} if dense else {})}
    samples = {step: run.samples.get((step, score.suite, score.condition), {}) for step in models}
    if not all(_reproduces(score, samples[step], value) for step, value in models.items()):
        return None
    last = samples.pop(None, None)
    return resample_examples(list(samples.values()), last, score.weights, score.suite)


def _reproduces(score: ReportedScore, samples: Samples, value: ScoreValue) -> bool:
    if not score.weights or any(not samples.get(cell) for cell in score.weights):
        return False
    means = {cell: fmean(samples[cell].values()) for cell in score.weights}
    total = sum(weight * means[cell] for cell, weight in score.weights.items())
    return abs(total - value.value) <= ROUNDING


def _trained(comparison: Comparison, score: ReportedScore) -> dict[str, Curve]:
    """Curves of the runs that were evaluated at step 0 and after training."""
    return {run.name: curve for run, curve in comparison.curves_of(score) if curve.is_trained}


def _mean_score(trained: Mapping[str, Curve]) -> statistics.Statistic:
    """Over the range of tokens that all curves share: means over different ranges are not
    comparable. The curve of a learned mask begins after the tokens it learned from."""
    until = min((float(curve.tokens[-1]) for curve in trained.values()), default=0.0)
    since = max((float(curve.tokens[0]) for curve in trained.values()), default=0.0)
    return statistics.mean_score(until, since)


def recoveries(comparison: Comparison) -> list[Recovery]:
    """For each average and each run that was evaluated at step 0 and after training."""
    rows = []
    for score in comparison.averages:
        trained = _trained(comparison, score)
        mean_score = _mean_score(trained)
        rows += [
            Recovery(
                name,
                score,
                curve,
                estimate(curve, statistics.gap_share),
                estimate(curve, statistics.tokens_to_share(0.5)),
                estimate(curve, statistics.tokens_to_share(0.9)),
                estimate(curve, mean_score),
            )
            for name, curve in trained.items()
        ]
    return rows


def has_recovered(comparison: Comparison, step: int) -> bool:
    """Whether the one run of the comparison is, at this step and on every suite, surely less than
    TOLERANCE points below the dense model. A suite of a single task has no average."""
    (run,) = comparison.runs
    for suite in comparison.suites:
        averages = [score for score in comparison.averages if score.suite == suite]
        known = [score for score in averages if comparison.curve(run.name, score)]
        for score in known or comparison.parts(suite):
            curve = comparison.curve(run.name, score)
            if curve is None or step not in curve.steps:
                return False
            gap = estimate(curve, statistics.gap_at(curve.steps.index(step)))
            if gap.low is None or gap.low <= -TOLERANCE:
                return False
    return bool(comparison.suites)


def baseline_differences(comparison: Comparison) -> list[BaselineDifference]:
    """For each average and each setup that has a baseline run to be compared with."""
    differences = []
    paired = pair_runs(comparison)
    ends_differ = "data.tokens" in _settings(comparison.baseline)
    for score in [*comparison.averages, *comparison.variants]:
        mean_score = _mean_score(_trained(comparison, score))
        for setup, names in paired.items():
            pairs = [
                (curve, base)
                for run, other in names
                if (curve := comparison.curve(run, score))
                and (base := comparison.curve(other, score))
            ]
            started = [(a, b) for a, b in pairs if a.starts_at_zero and b.starts_at_zero]
            trained = [(a, b) for a, b in started if a.is_trained and b.is_trained]
            ended = [(a, b) for a, b in trained if ends_differ or end_together(a, b)]
            if started:
                difference = BaselineDifference(
                    setup,
                    score,
                    estimate_difference(started, statistics.value_at(0)),
                    estimate_difference(ended, statistics.value_at(-1)) if ended else None,
                    estimate_difference(trained, mean_score) if trained else None,
                )
                differences.append(difference)
    return differences


def pair_runs(comparison: Comparison) -> dict[str, list[tuple[str, str]]]:
    """Setup -> pairs of a run and its baseline run. A baseline that is a method gives each run the
    one of the same model, ratio, window and seed; settings give it that of the same method, too. A
    baseline that is a run is paired with every other."""
    baseline = comparison.baseline
    if any(run.name == baseline for run in comparison.runs):
        return {r.name: [(r.name, str(baseline))] for r in comparison.runs if r.name != baseline}
    settings = _settings(baseline)

    def key(run: RunResults) -> dict[str, object]:
        """The same for a run and its baseline run."""
        facts = {"model": run.model, "ratio": run.ratio, "window": run.window, "seed": run.seed}
        if settings:
            facts["method"] = run.method.split()[0] if "mask.options" in settings else run.method
        return {name: fact for name, fact in facts.items() if name not in settings}

    def serves(base: RunResults, run: RunResults) -> bool:
        if key(base) != key(run):
            return False
        if settings:
            return _has(base, settings) and not _has(run, settings)
        return base.method == baseline != run.method

    def further(run: RunResults) -> list[str]:
        parts = run.differences.split(", ")
        return [part for part in parts if part.partition(" ")[0] not in settings]

    pairs: dict[str, list[tuple[str, str]]] = {}
    for run in comparison.runs:
        candidates = [base for base in comparison.runs if serves(base, run)]
        if candidates:
            # Of several, the one whose other settings differ in the same way.
            alike = (base for base in candidates if further(base) == further(run))
            base = next(alike, candidates[0])
            pairs.setdefault(run.setup, []).append((run.name, base.name))
    return pairs


def _settings(baseline: str | None) -> dict[str, str]:
    """Name -> value, of a baseline that is settings. A method with options has a blank."""
    if baseline is None or " " in baseline:
        return {}
    parts = [part.partition("=") for part in baseline.split(",") if "=" in part]
    return {name.replace("-", "_"): value for name, _, value in parts}


def _has(run: RunResults, settings: Mapping[str, str]) -> bool:
    own = flatten(run.config)

    def agrees(found: object, wanted: str) -> bool:
        text = " ".join(map(str, found)) if isinstance(found, list) else str(found)
        for read in (float, parse_count):  # 2e5, 200k
            with suppress(ValueError):
                if float(text) == read(wanted):
                    return True
        return text == wanted

    return all(agrees(own.get(name), value) for name, value in settings.items())


def find_drops(comparison: Comparison) -> list[Drop]:
    """Every checkpoint below step 0: averages first, significant ones before the others."""
    drops = []
    for run in comparison.runs:
        for score in comparison.scores:
            curve = comparison.curve(run.name, score)
            if curve is None or not curve.starts_at_zero:
                continue
            for place, step in enumerate(curve.steps[1:], 1):
                if curve.values[place] < curve.values[0] - 1e-9:
                    points = estimate(curve, statistics.gain_to(place))
                    drops.append(Drop(run.name, score, step, points))
    return sorted(drops, key=lambda drop: (drop.score.kind, not drop.points.excludes_zero))


def seed_means(comparison: Comparison, score: ReportedScore, at_end: bool) -> list[SeedMean]:
    """One for each setup, at step 0 or at the end of training. Runs that were not trained as far as
    the longest run of their setup are left out at the end."""
    setups: dict[str, list[tuple[RunResults, Curve]]] = {}
    for run, curve in comparison.curves_of(score):
        if curve.is_trained if at_end else curve.starts_at_zero:
            setups.setdefault(run.setup, []).append((run, curve))
    means = []
    for setup, members in setups.items():
        longest = max((curve for _, curve in members), key=lambda curve: float(curve.tokens[-1]))
        used = [(r, curve) for r, curve in members if not at_end or end_together(curve, longest)]
        runs, curves = zip(*used, strict=True)
        means.append(SeedMean(setup, runs, curves, -1 if at_end else 0))
    return means


def end_together(first: Curve, second: Curve) -> bool:
    """Whether two trainings saw as many tokens. The part that a learned mask takes is rounded to
    whole steps, so the sums may differ slightly."""
    return math.isclose(float(first.tokens[-1]), float(second.tokens[-1]), rel_tol=0.01)


def _find_baseline(wanted: str, runs: Sequence[RunResults]) -> str:
    for run in runs:
        if wanted == run.name or Path(wanted).resolve() == run.path.resolve():
            return run.name
    methods = sorted({run.method for run in runs})  # those without options come first
    for method in methods:
        if wanted in (method, method.split()[0]):
            return method
    if (settings := _settings(wanted)) and any(_has(run, settings) for run in runs):
        return wanted
    names = [*methods, *(run.name for run in runs)]
    raise UserError(
        f"--baseline {wanted} is no method or run, and no run has such settings; "
        f"{suggest(wanted, names)}"
    )
