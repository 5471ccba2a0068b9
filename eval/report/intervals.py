"""How far and how fast a score recovers, and how two runs differ: statistics of curves, each with a
confidence interval.

A curve is the score at a run's checkpoints over the number of training tokens, beside the dense
model's score. Intervals are percentiles of a paired bootstrap: examples are drawn with replacement,
the same ones for the dense model, every checkpoint and every run that answered them, so that their
common difficulty cancels out. Over several seeds the error of their mean comes on top.
"""

import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from bosch.eval.report.runs import RunResults
from bosch.eval.suites._reporting import Cell, ReportedScore, Samples, reporting_of

Numbers = NDArray[np.float64]
# A curve on many resamples of the examples, [replicate, point], and the dense model's [replicate]
# (nan: it was not evaluated).
Replicates = tuple[Numbers, Numbers]

LEVEL = 0.95  # confidence level of every interval
NUM_REPLICATES = 2000
NEVER = math.inf  # tokens to a share of the gap that was not reached


@dataclass(frozen=True)
class Point:
    """A score of one model."""

    value: float  # percent
    stderr: float = math.nan  # nan: unknown
    n: int = 0  # examples behind it
    tokens: float = math.nan  # that the model was trained on; nan: the dense model


@dataclass(frozen=True)
class Curve:
    """A score of a run over tokens. `make_curve` fills in the columns."""

    run: RunResults
    score: ReportedScore
    points: Mapping[int | None, Point]  # by step, rising; None: the dense model
    replicates: Replicates | None  # None: the scores of single examples are unknown
    steps: Sequence[int]  # of the hybrid
    tokens: Numbers  # at these steps
    values: Numbers  # at these steps; of a loss, its negatives
    dense: float  # nan: the dense model was not evaluated
    is_trained: bool  # step 0 and at least one later step were evaluated


def make_curve(
    run: RunResults,
    score: ReportedScore,
    points: Mapping[int | None, Point],
    replicates: Replicates | None = None,
) -> Curve:
    steps = [step for step in points if step is not None]
    return Curve(
        run=run,
        score=score,
        points=points,
        replicates=replicates,
        steps=steps,
        tokens=np.array([points[step].tokens for step in steps], float),
        values=np.array([points[step].value for step in steps], float),
        dense=points[None].value if None in points else math.nan,
        is_trained=0 in points and len(steps) > 1,
    )


@dataclass(frozen=True)
class Estimate:
    """A number and its interval. None: undefined, or unknown."""

    value: float | None
    low: float | None = None
    high: float | None = None
    num_seeds: int = 1  # it is the mean over so many


# tokens [point], values [..., point], dense [...] -> [...]
Statistic = Callable[[Numbers, Numbers, Numbers], Numbers]


def estimate(
    curves: Sequence[Curve], statistic: Statistic, baseline: Sequence[Curve] = ()
) -> Estimate:
    """The mean over curves, each of which is one seed, less that of the baseline's curves, which
    are resampled with the same examples. Undefined without curves; without an interval if more than
    5% of the replicates are undefined."""
    if not curves:
        return Estimate(None, num_seeds=0)
    # A pair is one seed: a run and its baseline run are resampled together, so what both find hard
    # cancels out in their difference.
    values, resampled = [], []
    for curve, base in zip_longest(curves, baseline):
        value, replicates = _apply(statistic, curve)
        if base is not None:
            base_value, base_replicates = _apply(statistic, base)
            value, replicates = value - base_value, replicates - base_replicates
        values.append(value)
        resampled.append(replicates)
    # A curve without replicates has one nan in their place, which stands in each row of its column.
    longest = max(map(len, resampled))
    table = np.array([np.broadcast_to(one, longest) for one in resampled]).T  # [replicate, seed]
    # How a run's seed falls is as much chance as which examples were asked.
    means = table.mean(axis=1) + draw_errors_of_mean(values, count=longest)
    known, tail, low, high = np.sort(means[~np.isnan(means)]), (1 - LEVEL) / 2, None, None
    if len(known) >= LEVEL * len(means):
        # Without interpolation, which infinite values (not reached) would break.
        low = float(known[math.floor(tail * len(known))])
        high = float(known[math.ceil((1 - tail) * len(known)) - 1])
    mean = float(np.mean(values))
    return Estimate(None if math.isnan(mean) else mean, low, high, len(values))


def draw_errors_of_mean(values: Sequence[float], count: int) -> Numbers:
    """By how much the mean of a few seeds misses that of all seeds: draws from the t distribution.

    Seeds are not drawn with replacement as examples are: none of three lies farther from their mean
    than they do, and such intervals of 95 % would hold the true mean in three cases of four.
    """
    if len(values) == 1:
        return np.zeros(count)
    if not np.isfinite(values).all():
        return np.full(count, math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return error * _draw_t(len(values) - 1, count)


@cache
def _draw_t(freedom: int, count: int) -> Numbers:
    """In random order, one of each of `count` equally likely parts of the t distribution, so that
    the ends of an interval do not depend on a few draws far out."""
    generator, each = np.random.default_rng(0), 200
    parts = np.sort(generator.standard_t(freedom, (count * each)))
    return generator.permutation(parts[each // 2 :: each])


def unseen(weights: Mapping[Cell, float], examples: Mapping[Cell, Collection[object]]) -> float:
    """Points by which two scores may differ though no example does, where resamples cannot either.

    What happens in none of n examples happens in at most 3 in n, at a level of 95 %. It may be in
    the part whose examples weigh most.
    """
    return max(part * min(100, 300 / len(examples[cell])) for cell, part in weights.items())


def _apply(statistic: Statistic, curve: Curve) -> tuple[float, Numbers]:
    """The statistic of the curve and of its replicates; one nan if there are none."""
    value = float(statistic(curve.tokens, curve.values, np.asarray(curve.dense)))
    if curve.replicates is None:
        return value, np.array([math.nan])
    values, dense = curve.replicates
    return value, statistic(curve.tokens, values, dense)


def value_at(place: int) -> Statistic:
    return lambda tokens, values, dense: values[..., place]


def value_after(count: float) -> Statistic:
    return lambda tokens, values, dense: values[..., tokens.tolist().index(count)]


def gap_at(place: int) -> Statistic:
    """Percentage points above the dense model at a point of the curve."""
    return lambda tokens, values, dense: values[..., place] - dense


def gap_share(tokens: Numbers, values: Numbers, dense: Numbers) -> Numbers:
    """Share of the gap between step 0 and the dense model that the last checkpoint recovers."""
    return (values[..., -1] - values[..., 0]) / _gap(values, dense)


def tokens_to_share(share: float) -> Statistic:
    """Tokens until that share of the gap is first recovered, interpolated linearly between
    checkpoints. Infinite if it never is."""

    def statistic(tokens: Numbers, values: Numbers, dense: Numbers) -> Numbers:
        gap = _gap(values, dense)
        level = (values[..., 0] + share * gap)[..., None]
        # The first point at that level and the one before it; the same where step 0 has reached it.
        reached = values >= level - 1e-9
        after = np.argmax(reached, axis=-1)[..., None]
        before = np.maximum(after - 1, 0)
        low, high = (np.take_along_axis(values, place, -1) for place in (before, after))
        part = np.clip((level - low) / np.where(high > low, high - low, 1.0), 0, 1)
        crossing = (tokens[before] + part * (tokens[after] - tokens[before]))[..., 0]
        return np.where(np.isnan(gap), np.nan, np.where(reached.any(-1), crossing, NEVER))

    return statistic


def _gap(values: Numbers, dense: Numbers) -> Numbers:
    """From step 0 up to the dense model; nan where there is none, of which no share is defined."""
    gap = dense - values[..., 0]
    return np.where(gap > 1e-9, gap, np.nan)


def resample_examples(
    points: Sequence[Samples], dense: Samples | None, weights: Mapping[Cell, float], suite: str
) -> Replicates | None:
    """Replicates of sum(weight x mean over the cell's examples). None if a point lacks a cell or
    has only one example of it, or if the points answered different examples."""
    models = [*points, dense] if dense is not None else list(points)
    alike = reporting_of(suite).tasks_alike
    # All models in one table, so that each replicate draws the same examples for all of them.
    total = np.zeros((NUM_REPLICATES, len(models)))
    for (task, length), weight in weights.items():
        cells = [model.get((task, length), {}) for model in models]
        indexes = sorted(cells[0])
        count = len(indexes)
        if count < 2 or any(sorted(scores) != indexes for scores in cells):
            return None
        scores = np.array([[scores[index] for index in indexes] for scores in cells])
        # Seeded by name, so that every run draws the same examples of a cell.
        shown = "any" if task in alike else length
        generator = np.random.default_rng(zlib.crc32(f"{suite}/{task}/{shown}/{count}".encode()))
        # How often each example is drawn, instead of which ones: the means are then one product of
        # matrices.
        counts = generator.multinomial(count, np.full(count, 1 / count), NUM_REPLICATES)
        total += weight * counts @ scores.T / count
    last = total[:, -1] if dense is not None else np.full(NUM_REPLICATES, math.nan)
    return total[:, : len(points)], last
