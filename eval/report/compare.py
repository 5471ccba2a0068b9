"""Runs side by side: their scores as curves over training, how far and fast each recovers,
checkpoints below step 0, and differences from a baseline.

`compare` reads runs into one `Comparison`; eval/report/page.py shows it. Each suite says which its
scores are (eval/suites/_reporting.py); its average under other windows and in longer texts than the
run's own (sweep.py --windows, --lengths) is a score too.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bosch.config import parse_count
from bosch.eval import lm_eval_bridge
from bosch.eval.report import intervals
from bosch.eval.report.intervals import Curve, Estimate, Replicates, estimate, estimate_difference
from bosch.eval.report.runs import RunResults, read_runs
from bosch.eval.suites._reporting import (
    AVERAGE,
    Cell,
    ReportedScore,
    Row,
    condition,
    reporting_of,
)
from bosch.plugins import suggest
from bosch.run.errors import UserError

# The suites round a task's percent to two decimals before they average.
ROUNDING = 0.02
TOLERANCE = 2.0  # points below the dense model that a recovered model may be
# What a run and its baseline run have in common, but for what the baseline names.
COMMON = ("model", "method", "mask.options", "ratio", "window", "seed")


@dataclass(frozen=True)
class ScoreValue:
    value: float  # percent
    stderr: float  # nan: unknown
    n: int  # examples behind it


@dataclass(frozen=True)
class Baseline:
    """What runs are compared with: one run, or those with some settings (a method is one)."""

    title: str
    run: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    runs: Sequence[RunResults]
    scores: Sequence[ReportedScore]  # of any run, suite by suite
    curves: Mapping[tuple[str, str, str], Curve]  # by run, suite and score
    dense: Mapping[tuple[str, str, str], ScoreValue]  # the same of each run's dense model
    baseline: Baseline | None = None

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


def compare(given: Sequence[Path | RunResults], baseline: str | None = None) -> Comparison:
    """`given`: run folders, and files written by `sweep.py --rows`. `baseline`: a method, the name
    or folder of one of the runs, or the settings of some (`window=64,train.trained=all`)."""
    runs = read_runs(given)
    found = None if baseline is None else _find_baseline(baseline, runs)
    scores: dict[tuple[str, str], ReportedScore] = {}
    curves: dict[tuple[str, str, str], Curve] = {}
    dense: dict[tuple[str, str, str], ScoreValue] = {}
    for run in runs:
        rows = [*run.rows, *run.variants]
        for score in find_scores(rows):
            scores.setdefault((score.suite, score.name), score)
            by_step: dict[Any, list[Row]] = {}  # None: the dense model
            for row in rows:
                if row["suite"] == score.suite:
                    by_step.setdefault(row["step"], []).append(row)
            key = (run.name, score.suite, score.name)
            if value := read_value(score, by_step.pop(None, [])):
                dense[key] = value
            if curve := _make_curve(run, score, by_step, value):
                curves[key] = curve
    return Comparison(runs, _sort_by_suite(scores.values()), curves, dense, found)


def _make_curve(
    run: RunResults,
    score: ReportedScore,
    by_step: Mapping[int, Sequence[Row]],
    dense: ScoreValue | None,
) -> Curve | None:
    """The score at every step where it was evaluated. None: at none, or tokens are unknown. Without
    replicates where predictions are missing or do not reproduce the suite's own numbers."""
    values: dict[Any, ScoreValue] = {}
    for step, rows in sorted(by_step.items()):
        value = read_value(score, rows)
        if value is not None and rows[0]["tokens"] is not None:
            values[step] = value
    if not values:
        return None
    replicates: Replicates | None = None
    models = {**values, **({None: dense} if dense else {})}
    samples = {step: run.samples.get((step, score.suite, score.condition), {}) for step in models}
    for step, value in models.items():
        if not score.weights or any(not samples[step].get(cell) for cell in score.weights):
            break
        means = {cell: fmean(samples[step][cell].values()) for cell in score.weights}
        total = sum(weight * means[cell] for cell, weight in score.weights.items())
        if abs(total - value.value) > ROUNDING:
            break
    else:
        last = samples.pop(None, None)
        replicates = intervals.resample_examples(
            list(samples.values()), last, score.weights, score.suite
        )
    return Curve(
        tuple(values),
        np.array([by_step[step][0]["tokens"] for step in values], float),
        np.array([value.value for value in values.values()]),
        np.array([value.stderr for value in values.values()]),
        math.nan if dense is None else dense.value,
        replicates,
    )


# ---------------------------------------------------------------------------------------- scores


def find_scores(rows: Sequence[Row]) -> list[ReportedScore]:
    """The scores that these rows hold, suite by suite. lm-eval's rows hold none: its metrics have
    other scales."""
    by_suite: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["suite"] != lm_eval_bridge.SUITE:
            by_suite.setdefault((row["suite"], condition(row)), []).append(row)
    all_scores: list[ReportedScore] = []
    for (suite, name), members in by_suite.items():
        scores = reporting_of(suite).reported_scores(members)
        averages = [score for score in scores if score.kind == "average"]
        variants = [replace(score, name=name, kind="variant") for score in averages]
        all_scores += variants if name else scores
    return _sort_by_suite(all_scores)


def _sort_by_suite(scores: Iterable[ReportedScore]) -> list[ReportedScore]:
    return sorted(scores, key=lambda s: (reporting_of(s.suite).report_order, s.suite))


def read_value(score: ReportedScore, rows: Sequence[Row]) -> ScoreValue | None:
    """The score in the rows of one model at one step; None where it was not evaluated."""
    mine = [r for r in rows if (r["suite"], condition(r)) == (score.suite, score.condition)]
    cells = headline_cells(score.suite, mine)
    written = cells.get((AVERAGE if score.condition else score.name, 0))
    if written is not None:
        return value_of(written)
    if score.written_by_suite or not score.weights or any(c not in cells for c in score.weights):
        return None
    parts = [(weight, value_of(cells[cell])) for cell, weight in score.weights.items()]
    return ScoreValue(
        sum(weight * part.value for weight, part in parts),
        math.sqrt(sum((weight * part.stderr) ** 2 for weight, part in parts)),
        sum(part.n for _, part in parts),
    )


def headline_cells(suite: str, rows: Sequence[Row]) -> dict[Cell, Row]:
    """A row for each task and length: that of the metric that counts."""
    headline = reporting_of(suite).headline_metric
    cells: dict[Cell, Row] = {}
    for row in rows:
        if row["metric"] == (headline(row["task"]) or row["metric"]):
            cells.setdefault((row["task"], row["length"] or 0), row)
    return cells


def value_of(row: Row) -> ScoreValue:
    stderr = row.get("stderr")
    return ScoreValue(row["value"], math.nan if stderr is None else stderr, row.get("n") or 0)


# --------------------------------------------------------------------------- what they come out as


def _trained(comparison: Comparison, score: ReportedScore) -> dict[str, Curve]:
    """Curves of the runs that were evaluated at step 0 and after training."""
    return {run.name: curve for run, curve in comparison.curves_of(score) if curve.is_trained}


def _mean_score(trained: Mapping[str, Curve]) -> intervals.Statistic:
    """Over the range of tokens that all curves share: means over different ranges are not
    comparable. The curve of a learned mask begins after the tokens it learned from."""
    until = min((float(curve.tokens[-1]) for curve in trained.values()), default=0.0)
    since = max((float(curve.tokens[0]) for curve in trained.values()), default=0.0)
    return intervals.mean_score(until, since)


def recoveries(comparison: Comparison) -> list[Recovery]:
    """For each average and each run that was evaluated at step 0 and after training."""
    rows = []
    for score in comparison.averages:
        trained = _trained(comparison, score)
        statistics = (
            intervals.gap_share,
            intervals.tokens_to_share(0.5),
            intervals.tokens_to_share(0.9),
            _mean_score(trained),
        )
        for name, curve in trained.items():
            rows.append(Recovery(name, score, curve, *(estimate(curve, s) for s in statistics)))
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
            gap = estimate(curve, intervals.gap_at(curve.steps.index(step)))
            if gap.low is None or gap.low <= -TOLERANCE:
                return False
    return bool(comparison.suites)


def seeds_of_setups(
    comparison: Comparison, score: ReportedScore, at_end: bool
) -> dict[str, list[tuple[RunResults, Curve]]]:
    """Runs that differ only in the seed, evaluated before training or at its end. Those that were
    not trained as far as the longest of their setup are left out at the end."""
    setups: dict[str, list[tuple[RunResults, Curve]]] = {}
    for run, curve in comparison.curves_of(score):
        if curve.is_trained if at_end else curve.starts_at_zero:
            setups.setdefault(run.setup, []).append((run, curve))
    if not at_end:
        return setups
    longest = {
        setup: max((curve for _, curve in members), key=lambda curve: float(curve.tokens[-1]))
        for setup, members in setups.items()
    }
    return {
        setup: [(run, curve) for run, curve in members if end_together(curve, longest[setup])]
        for setup, members in setups.items()
    }


def end_together(first: Curve, second: Curve) -> bool:
    """Whether two trainings saw as many tokens. The part that a learned mask takes is rounded to
    whole steps, so the sums may differ slightly."""
    return math.isclose(float(first.tokens[-1]), float(second.tokens[-1]), rel_tol=0.01)


# ---------------------------------------------------------------------------------- the baseline


def _find_baseline(wanted: str, runs: Sequence[RunResults]) -> Baseline:
    for run in runs:
        if wanted == run.name or Path(wanted).resolve() == run.path.resolve():
            return Baseline(run.name, run=run.name)
    methods = {run.method: run.settings for run in runs}
    for method in sorted(methods):  # those without options come first
        of = {name: str(methods[method][name]) for name in ("method", "mask.options")}
        if wanted in (method, of["method"]):
            return Baseline(method, settings=of)
    parts = [part.partition("=") for part in wanted.split(",") if "=" in part]
    settings = {name.replace("-", "_"): value for name, _, value in parts}
    if settings and any(_has(run, settings) for run in runs):
        return Baseline(wanted, settings=settings)
    names = [*sorted(methods), *(run.name for run in runs)]
    raise UserError(
        f"--baseline {wanted} is no method or run, and no run has such settings; "
        f"{suggest(wanted, names)}"
    )


def _has(run: RunResults, settings: Mapping[str, str]) -> bool:
    own = run.settings

    def agrees(found: object, wanted: str) -> bool:
        text = " ".join(map(str, found)) if isinstance(found, list) else str(found)
        for read in (float, parse_count):  # 2e5, 200k
            with suppress(ValueError):
                if float(text) == read(wanted):
                    return True
        return text == wanted

    return all(agrees(own.get(name), value) for name, value in settings.items())


def pair_runs(comparison: Comparison) -> dict[str, list[tuple[str, str]]]:
    """Setup -> pairs of a run and its baseline run. A baseline that is a run is paired with every
    other; settings give each run without them one that has them and else agrees in COMMON."""
    baseline = comparison.baseline
    if baseline is None:
        return {}
    if baseline.run is not None:
        others = [run.name for run in comparison.runs if run.name != baseline.run]
        return {name: [(name, baseline.run)] for name in others}
    shared = [name for name in COMMON if name not in baseline.settings]

    def further(run: RunResults) -> dict[str, object]:
        return {n: value for n, value in run.differences.items() if n not in baseline.settings}

    pairs: dict[str, list[tuple[str, str]]] = {}
    bases = [run for run in comparison.runs if _has(run, baseline.settings)]
    names = {base.name for base in bases}
    for run in (run for run in comparison.runs if run.name not in names):
        own = run.settings
        candidates = [
            base for base in bases if all(base.settings.get(n) == own.get(n) for n in shared)
        ]
        if candidates:
            # Of several, the one whose other settings differ in the same way.
            alike = (base for base in candidates if further(base) == further(run))
            base = next(alike, candidates[0])
            pairs.setdefault(run.setup, []).append((run.name, base.name))
    return pairs


def baseline_differences(comparison: Comparison) -> list[BaselineDifference]:
    """For each average and each setup that has a baseline run to be compared with."""
    differences = []
    paired = pair_runs(comparison)
    ends_differ = comparison.baseline is not None and "data.tokens" in comparison.baseline.settings
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
                    estimate_difference(started, intervals.value_at(0)),
                    estimate_difference(ended, intervals.value_at(-1)) if ended else None,
                    estimate_difference(trained, mean_score) if trained else None,
                )
                differences.append(difference)
    return differences
