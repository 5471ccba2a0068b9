"""The runs of a study by method, ratio and seed, and what BOSCH has over a rival in them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from eval.compare import Comparison
from eval.measures import Measure
from eval.recovery import Curve, Numbers, interval
from eval.report_cells import MISSING
from eval.resampling import resample_examples
from eval.rows import Row
from eval.run_results import RunResults

OURS = "bosch"
AS_PUBLISHED = "bosch keep_best=False"  # with the mask of stage 3, whatever earlier ones scored
DENSE = "dense"  # the model itself, among rows of methods
BEFORE, AFTER = 0, -1  # training: places in a curve


@dataclass(frozen=True)
class Study:
    comparison: Comparison
    trained: Sequence[str]  # methods of the recovery
    trained_ratio: float
    windows: Sequence[Row] = ()  # of evaluations that belong to no run, as are the next two:
    long: Sequence[Row] = ()  # averages, each with the examples behind it (`cells`)
    exchanged: Sequence[Row] = ()
    command: str = ""
    commits: Mapping[str, int] = field(default_factory=dict)  # runs by the code that made them
    left: Sequence[str] = ()  # parts of the plan that have not been run

    @property
    def cells(self) -> dict[tuple[str, float], list[RunResults]]:
        found: dict[tuple[str, float], list[RunResults]] = {}
        for run in self.comparison.runs:
            if run.ratio:
                found.setdefault((run.method, run.ratio), []).append(run)
        return found

    @property
    def methods(self) -> list[str]:
        return sorted({method for method, _ in self.cells})

    @property
    def ratios(self) -> list[float]:
        return sorted({ratio for _, ratio in self.cells})

    def dense_score(self, measure: Measure) -> float | None:
        """The dense model's, which all runs share."""
        for run in self.comparison.runs:
            score = self.comparison.dense.get((run.name, measure.suite, measure.name))
            if score is not None:
                return score.value
        return None

    def dense(self, measure: Measure) -> str:
        score = self.dense_score(measure)
        return MISSING if score is None else f"{score:.1f}"

    def curves(self, method: str, ratio: float, measure: Measure) -> dict[int, Curve]:
        """By seed."""
        return {
            run.seed or 0: curve
            for run in self.cells.get((method, ratio), [])
            if (curve := self.comparison.curve(run.name, measure)) and curve.starts_at_zero
        }


@dataclass(frozen=True)
class Point:
    """A score, and what it might have been on other examples."""

    value: float
    replicates: Numbers | None  # None: nothing is known of them


Points = Mapping[int, Point]  # by seed


def points_of_curves(curves: Mapping[int, Curve], place: int) -> Points:
    return {
        seed: Point(
            float(curve.values[place]),
            None if curve.replicates is None else curve.replicates.values[:, place],
        )
        for seed, curve in curves.items()
    }


def points_of_rows(rows: Sequence[Row], **wanted: object) -> Points:
    """Of the rows that have these values."""
    own = [row for row in rows if wanted.items() <= row.items()]
    return {row["seed"]: Point(row["value"], resample_row(row)) for row in own}


def resample_row(row: Row) -> Numbers | None:
    """With the examples drawn as for the curves of runs, so that differences are paired."""
    cells = {(task, length): (weight, scores) for task, length, weight, scores in row["cells"]}
    samples = {cell: dict(enumerate(scores)) for cell, (_, scores) in cells.items()}
    weights = {cell: weight for cell, (weight, _) in cells.items()}
    drawn = resample_examples([samples], None, weights, row["suite"])
    return None if drawn is None else drawn.values[:, 0]


@dataclass(frozen=True)
class Advantage:
    points: float
    low: float | None
    high: float | None
    num_seeds: int

    @property
    def sign(self) -> int:
        """1 or -1: the interval excludes zero. One seed says nothing of others."""
        if self.low is None or self.high is None or self.num_seeds < 2:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


def advantage(
    study: Study, rival: str, ratio: float, measure: Measure, place: int
) -> Advantage | None:
    """Points of ours above the rival's, before or after training."""
    ours, theirs = (
        {
            seed: curve
            for seed, curve in study.curves(method, ratio, measure).items()
            if place == BEFORE or curve.is_trained
        }
        for method in (OURS, rival)
    )
    return difference(points_of_curves(ours, place), points_of_curves(theirs, place))


def difference(ours: Points, theirs: Points) -> Advantage | None:
    """Over the seeds that both have."""
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    if not pairs:
        return None
    points = statistics.fmean(own.value - other.value for own, other in pairs)
    replicates = draw_seeds(pairs)
    ends = interval(replicates) if replicates is not None else (None, None)
    return Advantage(points, *ends, len(pairs))


def leads(rows: Sequence[Row], across: str) -> dict[tuple[str, str, float], Advantage]:
    """Points of ours above each rival, by suite, rival and value of `across`."""
    found: dict[tuple[str, str, float], Advantage] = {}
    for row in rows:
        place = {"suite": row["suite"], across: row[across]}
        key = (row["suite"], row["method"], row[across])
        if row["method"] not in (OURS, DENSE) and key not in found:
            ours, theirs = (
                points_of_rows(rows, method=method, **place) for method in (OURS, row["method"])
            )
            if lead := difference(ours, theirs):
                found[key] = lead
    return found


def draw_seeds(pairs: Sequence[tuple[Point, Point]]) -> Numbers | None:
    """Mean differences with seeds and examples drawn anew: examples are already in the points'
    replicates."""
    drawn = []
    for own, other in pairs:
        if own.replicates is None or other.replicates is None:
            return None
        drawn.append(own.replicates - other.replicates)
    table = np.array(drawn)
    seeds = np.random.default_rng(0).integers(0, len(pairs), table.shape[::-1])
    return table.T[np.arange(table.shape[1])[:, None], seeds].mean(axis=1)


def losses_above(
    runs: Sequence[RunResults],
    others: Sequence[RunResults],
    pick: Callable[[RunResults], float | None],
) -> list[float]:
    """Validation losses less the others', of the seeds that both have: each seed has a held-out
    text of its own, by which losses differ more than by masks."""
    theirs = {run.seed: pick(run) for run in others}
    pairs = ((pick(run), theirs.get(run.seed)) for run in runs)
    return [own - other for own, other in pairs if own is not None and other is not None]
