"""How far and how fast a score recovers and how two runs differ, worked out by hand, with the
intervals."""

import math
from pathlib import Path

import numpy as np
import pytest

from bosch.eval.report import intervals
from bosch.eval.report.intervals import (
    NEVER,
    Curve,
    Estimate,
    Point,
    Replicates,
    Statistic,
    estimate,
    resample_examples,
)
from bosch.eval.report.runs import RunResults
from bosch.eval.suites._reporting import ReportedScore

STEPS = (0, 1, 2, 4)
TOKENS = 100.0 * np.array(STEPS)
RUN, SCORE = RunResults(Path("run"), "run"), ReportedScore("niah", "average", "average", {})
GAIN = intervals.gain_to(-1)


def make_curve(values: list[float], dense: float) -> Curve:
    points = {step: Point(y, tokens=100 * step) for step, y in zip(STEPS, values, strict=True)}
    return Curve(RUN, SCORE, {None: Point(dense)} | points)


@pytest.mark.parametrize(
    ("values", "statistic", "number"),
    [
        ([20, 30, 50, 65], intervals.gap_share, 0.75),  # from 20 to 65 of a gap from 20 to 80
        ([20, 30, 50, 65], intervals.gain_to(2), 30),
        ([20, 30, 50, 65], intervals.tokens_to_share(0.5), 200),  # 50 is half way from 20 to 80
        ([20, 30, 40, 80], intervals.tokens_to_share(0.5), 250),  # and a quarter from 40 to 80
        ([20, 80, 10, 10], intervals.tokens_to_share(0.5), 50),  # the first time counts
        ([20, 30, 50, 65], intervals.tokens_to_share(0.9), NEVER),  # 74 is never seen
        ([20, 10, 5, 1], intervals.tokens_to_share(0.5), NEVER),
        # Trapezoids 25 x 100 + 40 x 100 + 57.5 x 200 = 18,000 over 400 tokens.
        ([20, 30, 50, 65], intervals.mean_score(), 45),
        # Up to 300, where the curve is at 57.5: 2,500 + 4,000 + 53.75 x 100.
        ([20, 30, 50, 65], intervals.mean_score(until=300), 11_875 / 300),
        # From 50, at 25, to 200: 27.5 x 50 + 40 x 100.
        ([20, 30, 50, 65], intervals.mean_score(until=200, since=50), 5_375 / 150),
        ([20, 30, 50, 65], intervals.mean_score(until=50, since=60), None),
    ],
)
def test_statistics_are_as_worked_out_by_hand(
    values: list[float], statistic: Statistic, number: float | None
) -> None:
    result = estimate([make_curve(values, 80)], statistic)
    assert result == Estimate(number if number is None else pytest.approx(number))


# ----------------------------------------------------------------------------------- differences


def at(value: float, replicates: list[float] | None = None) -> Curve:
    """A curve of one point."""
    drawn = None
    if replicates is not None:
        many = np.repeat(replicates, 1000)
        drawn = Replicates(many[:, None], np.full(len(many), math.nan))
    return Curve(RUN, SCORE, {0: Point(value, tokens=0)}, drawn)


def difference(pairs: list[tuple[Curve, Curve]]) -> Estimate:
    return estimate([a for a, _ in pairs], intervals.value_at(0), [b for _, b in pairs])


def test_difference_of_one_seed_is_resampled_over_examples_only() -> None:
    # The first is 10 better on every resample: difficulty that both share cancels out.
    pair = (at(60, [50, 60, 70]), at(50, [40, 50, 60]))
    known = difference([pair])
    assert known == Estimate(10, 10, 10, 1)
    unknown = difference([(at(60), at(50, [50]))])
    assert unknown == Estimate(10, None, None, 1)


def test_differences_are_resampled_over_seeds_and_examples() -> None:
    """By hand: resampling two seeds with differences 0 and 20 gives 0, 10, 10 or 20."""
    pairs = [(at(50, [50]), at(50, [50])), (at(70, [70]), at(50, [50]))]
    result = difference(pairs)
    assert (result.value, result.low, result.high, result.num_seeds) == (10, 0, 20, 2)
    # Differences of 5 and 6 exclude zero; three seeds are resampled like two.
    near = [(at(55, [55]), at(50, [50])), *[(at(56, [56]), at(50, [50]))] * 2]
    result = difference(near)
    assert (result.low, result.high, result.num_seeds) == (5, 6, 3)
    assert result.value == pytest.approx(17 / 3)
    assert result.excludes_zero


# ------------------------------------------------------------------------------------ replicates


CELL = ("task", 512)


def test_paired_replicates_cancel_shared_difficulty() -> None:
    step_0 = {CELL: {i: 100.0 * (i < 40) for i in range(100)}}
    later = {CELL: {i: 100.0 * (i < 60) for i in range(100)}}
    drawn = resample_examples([step_0, later], later, {CELL: 1.0}, "niah")
    assert drawn is not None
    assert (drawn.dense == drawn.values[:, 1]).all()  # the same answers, so the same draws
    # The gain is the number of the 20 examples drawn, with n p (1 - p) = 100 x .2 x .8: 4 points.
    gains = GAIN(TOKENS, drawn.values, drawn.dense)
    assert gains.mean() == pytest.approx(20, abs=0.5)
    assert gains.std() == pytest.approx(4, abs=0.3)
    assert (gains >= 0).all()
