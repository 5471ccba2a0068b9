"""The runs of a study by method, ratio and seed, and what BOSCH has over a rival in them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from eval.compare import Comparison
from eval.measures import Measure
from eval.recovery import Curve, Numbers, interval
from eval.report_cells import MISSING
from eval.rows import Row
from eval.run_results import RunResults

OURS = "bosch"
AS_PUBLISHED = "bosch keep_best=False"  # with the mask of stage 3, whatever earlier ones scored
BEFORE, AFTER = 0, -1  # training: places in a curve


@dataclass(frozen=True)
class Study:
    comparison: Comparison
    trained: Sequence[str]  # methods of the recovery
    trained_ratio: float
    windows: Sequence[Row] = ()
    long: Sequence[Row] = ()
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


def advantage(
    study: Study, rival: str, ratio: float, measure: Measure, place: int
) -> Advantage | None:
    """Points of ours above the rival's, before or after training, over the seeds of both."""
    ours = study.curves(OURS, ratio, measure)
    theirs = study.curves(rival, ratio, measure)
    both = ((ours[s], theirs[s]) for s in sorted(ours.keys() & theirs.keys()))
    pairs = [pair for pair in both if place == BEFORE or all(one.is_trained for one in pair)]
    if not pairs:
        return None
    points = statistics.fmean(float(a.values[place] - b.values[place]) for a, b in pairs)
    replicates = draw_seeds(pairs, place)
    ends = interval(replicates) if replicates is not None else (None, None)
    return Advantage(points, *ends, len(pairs))


def draw_seeds(pairs: Sequence[tuple[Curve, Curve]], place: int) -> Numbers | None:
    """Mean differences with seeds and examples drawn anew: examples are already in the curves'
    replicates."""
    drawn = []
    for ours, theirs in pairs:
        if ours.replicates is None or theirs.replicates is None:
            return None
        drawn.append(ours.replicates.values[:, place] - theirs.replicates.values[:, place])
    table = np.array(drawn)
    seeds = np.random.default_rng(0).integers(0, len(pairs), table.shape[::-1])
    return table.T[np.arange(table.shape[1])[:, None], seeds].mean(axis=1)
