"""How far and how fast a score recovers: statistics of one curve, each with its interval.

A curve is a score at a run's checkpoints, over the tokens it was trained on, beside the dense
model's score. Intervals are percentiles over replicates: the curve as other examples might have
shown it (eval/report/resampling.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

LEVEL = 0.95  # of every interval
NO_INTERVALS = "no intervals"
NEVER = math.inf  # tokens to a share of the gap that was not reached


@dataclass(frozen=True)
class Replicates:
    """The same curve many times over."""

    values: Numbers  # [replicate, point]
    dense: Numbers  # [replicate]; nan: there is no dense model's score
    source: str  # how they were made, for the reader


@dataclass(frozen=True)
class Curve:
    """A score over tokens. The first point is step 0, if that was evaluated."""

    steps: tuple[int, ...]  # rising
    tokens: Numbers  # [point]
    values: Numbers  # [point], percent
    stderrs: Numbers  # [point]; nan: unknown
    dense: float = math.nan
    dense_stderr: float = math.nan
    replicates: Replicates | None = None

    @property
    def starts_at_zero(self) -> bool:
        return self.steps[0] == 0

    @property
    def is_trained(self) -> bool:
        """Whether there is a step 0 and something after it."""
        return self.starts_at_zero and len(self.steps) > 1

    @property
    def source(self) -> str:
        return self.replicates.source if self.replicates else NO_INTERVALS


@dataclass(frozen=True)
class Estimate:
    """A number and its interval. None: not defined, or nothing is known of it."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval says on which side of zero the number is."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


# A statistic takes values [..., point] and the dense model's [...], and gives one number each.
Statistic = Callable[[Numbers, Numbers], Numbers]


def estimate(curve: Curve, statistic: Statistic) -> Estimate:
    value = float(statistic(curve.values, np.asarray(curve.dense)))
    if curve.replicates is None:
        return Estimate(_defined(value))
    repeated = statistic(curve.replicates.values, curve.replicates.dense)
    return Estimate(_defined(value), *interval(repeated))


def estimate_difference(curve: Curve, baseline: Curve, statistic: Statistic) -> Estimate:
    return estimate_pair(curve, statistic, baseline, statistic)


def estimate_pair(
    curve: Curve, statistic: Statistic, baseline: Curve, its_statistic: Statistic
) -> Estimate:
    """A statistic less the baseline's. Runs that answered the same examples have the same examples
    in a replicate, which makes this a paired difference."""
    value = float(statistic(curve.values, np.asarray(curve.dense))) - float(
        its_statistic(baseline.values, np.asarray(baseline.dense))
    )
    own, other = curve.replicates, baseline.replicates
    if own is None or other is None:
        return Estimate(_defined(value))
    first, second = statistic(own.values, own.dense), its_statistic(other.values, other.dense)
    return Estimate(_defined(value), *interval(first - second))


def interval(replicates: Numbers) -> tuple[float | None, float | None]:
    """The middle 95 % of the replicates, infinite ones (not reached) included. (None, None) where
    more than 5 % of them are not defined."""
    known = np.sort(replicates[~np.isnan(replicates)])
    if len(known) < LEVEL * len(replicates) or len(known) == 0:
        return None, None
    # No interpolation: between a number and infinity there is nothing.
    tail = (1 - LEVEL) / 2
    first, last = math.floor(tail * len(known)), math.ceil((1 - tail) * len(known)) - 1
    return float(known[first]), float(known[last])


# ----------------------------------------------------------------------------------- statistics


def first_value(values: Numbers, dense: Numbers) -> Numbers:
    return values[..., 0]


def final_value(values: Numbers, dense: Numbers) -> Numbers:
    return values[..., -1]


def gain(values: Numbers, dense: Numbers) -> Numbers:
    """Points from step 0 to the last checkpoint."""
    return values[..., -1] - values[..., 0]


def gap_share(values: Numbers, dense: Numbers) -> Numbers:
    """Share of the gap between step 0 and the dense model that the last checkpoint has closed. Not
    defined (nan) where step 0 is not below the dense model."""
    return gain(values, dense) / _gap(values, dense)


def tokens_to_share(tokens: Numbers, share: float) -> Statistic:
    """Tokens until that share of the gap is closed for the first time, on straight lines between
    checkpoints. Infinite where it never is."""

    def statistic(values: Numbers, dense: Numbers) -> Numbers:
        gap = _gap(values, dense)
        level = (values[..., 0] + share * gap)[..., None]
        reached = values >= level - 1e-9
        after = np.argmax(reached, axis=-1)[..., None]
        before = np.maximum(after - 1, 0)
        low, high = (np.take_along_axis(values, place, -1) for place in (before, after))
        rise = np.where(high > low, high - low, 1.0)
        part = np.clip((level - low) / rise, 0, 1)
        found = (tokens[before] + part * (tokens[after] - tokens[before]))[..., 0]
        return np.where(np.isnan(gap), np.nan, np.where(reached.any(-1), found, NEVER))

    return statistic


def mean_score(
    tokens: Numbers, until: float | None = None, since: float | None = None
) -> Statistic:
    """Area under the curve over its width: the mean score on the way, in points. `since`, `until`:
    only the tokens between, for runs that start or end elsewhere."""
    first, last = float(tokens[0]), float(tokens[-1])
    begin = first if since is None else max(since, first)
    end = last if until is None else min(until, last)
    inside = tokens[(tokens > begin) & (tokens < end)]
    places = np.concatenate([[begin], inside, [end]])
    # What each point has in the curve's height at each place.
    parts = np.array([np.interp(places, tokens, one) for one in np.eye(len(tokens))])

    def statistic(values: Numbers, dense: Numbers) -> Numbers:
        if end <= begin:
            return np.full(values.shape[:-1], np.nan)
        heights = values @ parts
        area = ((heights[..., 1:] + heights[..., :-1]) / 2 * np.diff(places)).sum(-1)
        return np.asarray(area / (end - begin))

    return statistic


def _gap(values: Numbers, dense: Numbers) -> Numbers:
    gap = dense - values[..., 0]
    return np.where(gap > 1e-9, gap, np.nan)


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value
