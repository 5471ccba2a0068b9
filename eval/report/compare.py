"""Runs side by side: their scores as curves over training, how far and fast each recovers, and
differences from a baseline.

`compare` reads runs into one `Comparison`; eval/report/page.py shows it. Each suite says which its
scores are (eval/suites/_reporting.py); its average under other windows and in longer texts than the
run's own (`bosch sweep` --windows, --lengths) is a score too.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from bosch.config import Config, parse_count
from bosch.eval.report import intervals
from bosch.eval.report.intervals import Curve, Estimate, Point, estimate, make_curve
from bosch.eval.report.runs import LOSSES, RunResults, read_runs
from bosch.eval.results import LM_EVAL
from bosch.eval.suites import _reporting
from bosch.eval.suites._reporting import Cell, Kind, ReportedScore, Row, Samples, condition
from bosch.plugins import suggest
from bosch.run.errors import UserError
from bosch.run.fingerprint import plain
from bosch.run.stage import flatten

LOSS = ReportedScore("loss", "validation loss", "loss", {("loss", 0): 1.0})
SHARES = (0.5, 0.9, 0.95, 0.99)  # of a gap, for the tokens until it is closed so far
# Of the interval of a recovered share: what a headline can have, and what it should have.
WIDEST, WANTED = 1.0, 0.5
TOLERANCE = 2.0  # points below the dense model that a recovered model may be
# Settings that change no result. Those of the evaluation only change which results there are.
# Questions of one's own decide a mask: their stage counts what the file holds, not its name.
SPEED = flatten(asdict(Config())).keys() - flatten(plain(Config())).keys()
SPEED -= {"calibration.questions"}
TRAINING = ("train.", "data.")  # begin the names of settings of what follows step 0
MASK = ("method", "window", "sink", "mask", "calibration")  # which the dense model has none of


@dataclass(frozen=True)
class Baseline:
    """What runs are compared with: one run, or those with some settings (a method is one)."""

    title: str = ""
    pairs: Mapping[str, Sequence["Pair"]] = field(default_factory=dict)  # by setup
    # Settings that keep runs from being compared with it -> these runs.
    apart: Mapping[tuple[str, ...], Sequence[str]] = field(default_factory=dict)
    differs_in_tokens: bool = False  # so ends of trainings of other lengths are compared


@dataclass(frozen=True)
class Pair:
    """A run and its baseline run: they agree in all that matters before training."""

    run: RunResults
    base: RunResults
    is_trained_alike: bool = True


@dataclass(frozen=True)
class Recovery:
    """How far and how fast one score of one run recovers."""

    curve: Curve
    gap_share: Estimate  # share of the gap to the dense model that is recovered at the end
    tokens_to: Mapping[float, Estimate]  # for each of SHARES
    num_examples: int  # of each model; of a loss, sequences
    unseen: float  # points that the dense model's score may differ by if no example does

    @property
    def has_clear_gap(self) -> bool:
        """Whether step 0 is significantly below the dense model. If not, the share is undefined for
        some of the resamples and arbitrary for others."""
        is_known = self.curve.replicates is None or self.gap_share.low is not None
        return is_known and self.gap_share.value is not None

    @property
    def num_needed(self) -> int | None:
        """About how many examples would tell which share was recovered, where the interval is so
        wide that half of the gap could be all or nothing; in two digits, rounded up. None: the
        interval is narrower, or unknown."""
        low, high = self.gap_share.low, self.gap_share.high
        if low is None or high is None or high - low <= WIDEST:
            return None
        # An interval's width falls with the square root of the number of examples.
        needed = math.ceil(self.num_examples * ((high - low) / WANTED) ** 2)
        unit = 10 ** max(0, len(str(needed)) - 2)
        return math.ceil(needed / unit) * unit


@dataclass(frozen=True)
class BaselineDifference:
    """Points (of the loss, nats) above the baseline, averaged over the seeds evaluated so far."""

    setup: str  # of the runs; the run's name where the baseline is one run
    score: ReportedScore
    start: Estimate  # before training
    end: Estimate  # after training


@dataclass(frozen=True)
class Comparison:
    runs: Sequence[RunResults]
    scores: Sequence[ReportedScore]  # of any run, suite by suite
    # By run and score, and the loss; without points where the run was not evaluated.
    curves: Mapping[tuple[str, ReportedScore], Curve]
    baseline: Baseline
    suites: Sequence[str]

    def curves_of(self, score: ReportedScore) -> list[Curve]:
        """Those of runs that were evaluated."""
        curves = [self.curves[run.name, score] for run in self.runs]
        return [curve for curve in curves if curve.steps]

    def scores_of(self, kind: Kind, suite: str | None = None) -> list[ReportedScore]:
        """Averages, parts or variants, of one suite or of all."""
        of_kind = [score for score in self.scores if score.kind == kind]
        return [score for score in of_kind if suite in (None, score.suite)]

    @property
    def headlines(self) -> list[ReportedScore]:
        """Of each suite its average; the parts of a suite that has none, as RULER without some of
        its tasks."""
        found = []
        for suite in self.suites:
            averages = self.scores_of("average", suite)
            known = [score for score in averages if self.curves_of(score)]
            found += known or self.scores_of("part", suite)
        return found

    @cached_property
    def recoveries(self) -> list[Recovery]:
        """Of each headline and of the loss, for each run that has it at step 0 and later."""
        rows = []
        for headline in [*self.headlines, LOSS]:
            for curve in self.curves_of(headline):
                score = curve.score  # of the tasks and lengths that this run was asked
                if curve.is_trained and not (score is LOSS and math.isnan(curve.dense)):
                    share = estimate([curve], intervals.gap_share)
                    tokens = {n: estimate([curve], intervals.tokens_to_share(n)) for n in SHARES}
                    last = curve.points[curve.steps[-1]]
                    key = (curve.steps[-1], score.suite, "")
                    examples = curve.run.samples.get(key, {})
                    is_known = bool(score.weights) and score.weights.keys() <= examples.keys()
                    bound = intervals.unseen(score.weights, examples) if is_known else math.nan
                    rows.append(Recovery(curve, share, tokens, last.n, bound))
        return rows

    @cached_property
    def differences(self) -> list[BaselineDifference]:
        """For each headline, the loss and each setup that has a baseline run to compare it with."""
        found = []
        for score in [*self.headlines, *self.scores_of("variant"), LOSS]:
            for setup, pairs in self.baseline.pairs.items():
                ours, bases = [], []  # of pairs that were both evaluated before training
                trained_ours, trained_bases = [], []  # and after it
                for pair in pairs:
                    our = self.curves[pair.run.name, score]
                    base = self.curves[pair.base.name, score]
                    if score is LOSS:  # whose negatives the curves hold
                        our, base = base, our
                    if 0 in our.points and 0 in base.points and was_asked_alike(our, base):
                        ours.append(our)
                        bases.append(base)
                        is_alike = pair.is_trained_alike and our.is_trained and base.is_trained
                        is_same_end = self.baseline.differs_in_tokens or is_as_long(
                            our.tokens[-1], base.tokens[-1]
                        )
                        if is_alike and is_same_end:
                            trained_ours.append(our)
                            trained_bases.append(base)
                if ours:
                    start = estimate(ours, intervals.value_at(0), bases)
                    end = estimate(trained_ours, intervals.value_at(-1), trained_bases)
                    found.append(BaselineDifference(setup, score, start, end))
        return found


def was_asked_alike(curve: Curve, other: Curve) -> bool:
    """Whether a score is of as many examples of the same tasks. The average of other tasks has the
    same name, and is another score."""
    counts = [each.points[0].n for each in (curve, other)]
    is_alike = curve.score.weights == other.score.weights and counts[0] == counts[1]
    return is_alike and not had_other_texts(curve, other)


def had_other_texts(curve: Curve, other: Curve) -> bool:
    """As needles have that are hidden in another text: number 3 of one is not number 3 of the
    other. Of earlier evaluations it is not known."""
    under = curve.score.name if curve.score.kind == "variant" else ""
    key = (0, curve.score.suite, under)
    mine, their = (each.run.examples.get(key, {}) for each in (curve, other))
    # One hash is of all examples of a part: of fewer of the same it is another.
    ours, others = (each.run.samples.get(key, {}) for each in (curve, other))
    both = mine.keys() & their.keys() & curve.score.weights.keys()
    alike = [cell for cell in both if len(ours.get(cell, ())) == len(others.get(cell, ()))]
    return any(mine[cell] != their[cell] for cell in alike)


def by_text(curves: Iterable[Curve]) -> list[list[Curve]]:
    """Curves of runs that were asked the same texts, as far as it is known."""
    found: list[list[Curve]] = []
    for curve in curves:
        same = [members for members in found if not had_other_texts(curve, members[0])]
        if same:
            same[0].append(curve)
        else:
            found.append([curve])
    return found


def compare(given: Sequence[Path | RunResults], baseline: str | None = None) -> Comparison:
    """`given`: run folders, and files written by `bosch sweep --rows`. `baseline`: a method, the
    name or folder of one of the runs, or the settings of some (`window=64,train.trained=all`)."""
    runs = read_runs(given)
    found = Baseline() if baseline is None else _find_baseline(baseline, runs)
    curves = {(run.name, curve.score): curve for run in runs for curve in _read_curves(run)}
    scores = dict.fromkeys(score for _, score in curves)
    order = sorted(scores, key=lambda s: (_reporting.reporting_of(s.suite).report_order, s.suite))
    for run in runs:
        curves[run.name, LOSS] = _read_losses(run)
        for score in order:  # a run may not have been evaluated for what others were
            curves.setdefault((run.name, score), make_curve(run, score, {}))
    suites = list(dict.fromkeys(score.suite for score in order))
    return Comparison(runs, order, curves, found, suites)


def _read_curves(run: RunResults) -> Iterator[Curve]:
    """Every score of every suite and condition, at the steps whose tokens are known. lm-eval's rows
    give none: its metrics have other scales."""
    found: dict[tuple[str, str], dict[int | None, list[Row]]] = {}
    for row in (*run.rows, *run.variants):
        if row["suite"] != LM_EVAL:
            by_step = found.setdefault((row["suite"], condition(row)), {})
            by_step.setdefault(row["step"], []).append(row)
    for (suite, under), by_step in found.items():
        rows = [row for members in by_step.values() for row in members]
        steps = sorted(by_step, key=in_order)
        # Once for each step: all scores of the suite are picked from these.
        cells = {step: headline_points(suite, by_step[step]) for step in steps}
        # From the rows of all steps, so that a score has the same parts at each of them. Where a
        # step lacks one of the parts it has no point.
        for score in _reporting.reporting_of(suite).reported_scores(rows):
            # Under other windows or lengths the average is compared, not each of its tasks.
            if under and score.kind != "average":
                continue
            points = {
                step: point
                for step, known in cells.items()
                if (point := _read_point(score, known))
                and (step is None or not math.isnan(point.tokens))
            }
            samples = {step: run.samples.get((step, suite, under), {}) for step in points}
            shown = replace(score, name=under, kind="variant") if under else score
            yield _with_replicates(make_curve(run, shown, points), samples)


def in_order(step: int | None) -> int:
    """The dense model comes first."""
    return -1 if step is None else step


def _read_losses(run: RunResults) -> Curve:
    """The loss on held-out texts, and its replicates over their sequences."""
    points: dict[int | None, Point] = {}
    samples: dict[int | None, Samples] = {}
    for row in run.training:
        # The dense model's loss stands in rows of the run, one for all: it is the point at step
        # None, which comes first.
        for name in reversed(LOSSES):
            if isinstance(loss := row.get(name), int | float) and math.isfinite(loss):
                each = row.get(f"{name}_by_sequence") or []
                is_dense = name.startswith("dense")
                step, tokens = (None, math.nan) if is_dense else (row.get("step"), row["tokens"])
                # Negative, so that more is better, as for all scores.
                points[step] = Point(-loss, n=len(each), tokens=tokens)
                samples[step] = {("loss", 0): {n: -one for n, one in enumerate(each)}}
    return _with_replicates(make_curve(run, LOSS, points), samples)


def _with_replicates(curve: Curve, samples: Mapping[int | None, Samples]) -> Curve:
    """Unless the weights or some predictions are unknown."""
    score, weights = curve.score, curve.score.weights
    known = all(samples[step].get(cell) for step in curve.points for cell in weights)
    if not (curve.steps and weights and known):
        return curve
    by_step = [samples[step] for step in curve.steps]
    drawn = intervals.resample_examples(by_step, samples.get(None), weights, score.suite)
    return replace(curve, replicates=drawn)


def _read_point(score: ReportedScore, cells: Mapping[Cell, Point]) -> Point | None:
    """The score of one model under one condition; None where it was not evaluated."""
    if (score.name, 0) in cells:
        return cells[score.name, 0]
    if score.written_by_suite or not score.weights or any(c not in cells for c in score.weights):
        return None
    parts = [(weight, cells[cell]) for cell, weight in score.weights.items()]
    return Point(
        sum(weight * part.value for weight, part in parts),
        math.sqrt(sum((weight * part.stderr) ** 2 for weight, part in parts)),
        sum(part.n for _, part in parts),
        parts[0][1].tokens,
    )


def headline_points(suite: str, rows: Sequence[Row]) -> dict[Cell, Point]:
    """For each task and length the result by the metric that counts."""
    headline = _reporting.reporting_of(suite).headline_metric
    cells: dict[Cell, Point] = {}
    for row in rows:
        if row["metric"] == (headline(row["task"]) or row["metric"]):
            numbers = (row.get(name) for name in ("stderr", "tokens"))
            stderr, tokens = (math.nan if number is None else number for number in numbers)
            point = Point(row["value"], stderr, row["n"], tokens)
            cells.setdefault((row["task"], row["length"] or 0), point)
    return cells


# --------------------------------------------------------------------------- what they come out as


def has_recovered(comparison: Comparison, step: int) -> bool:
    """Whether the one run of the comparison is, at this step and on every suite, surely less than
    TOLERANCE points below the dense model."""
    for score in comparison.headlines:
        curve = comparison.curves[comparison.runs[0].name, score]
        if step not in curve.points:
            return False
        gap = estimate([curve], intervals.gap_at(curve.steps.index(step)))
        if gap.low is None or gap.low <= -TOLERANCE:
            return False
    return bool(comparison.suites)


def by_setup(curves: Iterable[Curve]) -> dict[str, list[Curve]]:
    """Curves of runs that differ only in the seed."""
    setups: dict[str, list[Curve]] = {}
    for curve in curves:
        setups.setdefault(curve.run.setup, []).append(curve)
    return setups


def seeds_of_setups(
    comparison: Comparison, score: ReportedScore, at_end: bool
) -> dict[str, list[Curve]]:
    """Those evaluated before training, or at its end. Runs that were not trained as far as the
    longest of their setup are left out at the end."""
    curves = comparison.curves_of(score)
    if not at_end:
        return by_setup(curve for curve in curves if 0 in curve.points)
    setups = by_setup(curve for curve in curves if curve.is_trained)
    for setup, members in setups.items():
        # A run that was stopped, or still goes on, would pull the mean of its setup down.
        last = max(curve.tokens[-1] for curve in members)
        setups[setup] = [curve for curve in members if is_as_long(curve.tokens[-1], last)]
    return setups


def is_as_long(end: float, other: float) -> bool:
    """Whether two trainings saw as many tokens. The part that a learned mask takes is rounded to
    whole steps, so the sums may differ slightly."""
    return math.isclose(end, other, rel_tol=0.01)


def _find_baseline(wanted: str, runs: Sequence[RunResults]) -> Baseline:
    """One run, by its name or folder, is beside each of the others. Of settings, each run without
    them is paired with the one of those that have them which else agrees with it."""
    for base in runs:
        if wanted == base.name or Path(wanted).resolve() == base.path.resolve():
            pairs = {run.name: [Pair(run, base)] for run in runs if run is not base}
            return Baseline(base.name, pairs)
    title, settings = _settings_of_baseline(wanted, runs)
    bases = [
        run
        for run in runs
        if settings and all(_agrees(run.settings.get(n), value) for n, value in settings.items())
    ]
    if not bases:
        names = [*sorted({run.method for run in runs}), *(run.name for run in runs)]
        problem = f"--baseline {wanted} is no method or run, and no run has such settings"
        raise UserError(f"{problem}; {suggest(wanted, names)}")
    by_setup: dict[str, list[Pair]] = {}
    apart: dict[tuple[str, ...], list[str]] = {}
    for run in (run for run in runs if run not in bases):
        # The base run with the fewest differences before step 0; among these the fewest in the
        # training, then in the evaluation. Only the first of these keep runs from being compared at
        # all.
        fits = [(*_disagreements(run, base, settings.keys()), base) for base in bases]
        before, trained, _, base = min(fits, key=lambda fit: [len(names) for names in fit[:3]])
        if not before:
            by_setup.setdefault(run.setup, []).append(Pair(run, base, not trained))
        if differing := before | trained:
            apart.setdefault(tuple(sorted(differing)), []).append(run.name)
    return Baseline(title, by_setup, apart, "data.tokens" in settings)


def _settings_of_baseline(wanted: str, runs: Sequence[RunResults]) -> tuple[str, dict[str, str]]:
    """What to call them, and their values, of `window=64,train.trained=all` or of a method."""
    parts = [part.partition("=") for part in wanted.split(",") if "=" in part]
    # `200k` of a command line and 200000 of run.json are compared by `_agrees`, not here.
    title, settings = wanted, {name.replace("-", "_"): value for name, _, value in parts}
    for run in sorted(runs, key=lambda run: run.method, reverse=True):  # without options comes last
        if wanted in (run.method, run.settings["method"]):
            title = run.method
            settings = {name: str(run.settings[name]) for name in ("method", "mask.options")}
    return title, settings


def _disagreements(
    run: RunResults, base: RunResults, named: Set[str]
) -> tuple[set[str], set[str], set[str]]:
    """Settings in which they differ, but for those named: of all before step 0, of the training,
    and of the evaluation."""
    mine, other = run.settings, base.settings
    names = {name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)}
    names -= named | SPEED
    if None in (mine.get("weights"), other.get("weights")):  # unknown, or learned with the mask
        names.discard("weights")
    # A dense baseline was trained alike, but has no mask whose settings could differ.
    if other["ratio"] == 0:
        names = {name for name in names if name.partition(".")[0] not in MASK}
    trained = {name for name in names if name.startswith(TRAINING)}
    evaluated = {name for name in names if name.startswith("eval.")}
    return names - trained - evaluated, trained, evaluated


def _agrees(found: object, wanted: str) -> bool:
    text = " ".join(map(str, found)) if isinstance(found, list) else str(found)
    for read in (float, parse_count):  # 2e5, 200k
        with suppress(ValueError):
            if float(text) == read(wanted):
                return True
    return text == wanted
