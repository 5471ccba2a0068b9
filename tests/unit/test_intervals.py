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
    Statistic,
    estimate,
    make_curve,
)
from bosch.eval.report.runs import RunResults
from bosch.eval.suites._reporting import ReportedScore

TOKENS = 100.0 * np.array([0, 1, 2, 4])
RUN, SCORE = RunResults(Path("run"), "run"), ReportedScore("niah", "average", "average", {})


@pytest.mark.parametrize(
    ("values", "statistic", "number"),
    [
        ([20, 30, 50, 65], intervals.gap_share, 0.75),  # from 20 to 65 of a gap from 20 to 80
        ([20, 30, 50, 65], intervals.gap_at(2), -30),
        ([20, 30, 50, 65], intervals.tokens_to_share(0.5), 200),  # 50 is half way from 20 to 80
        ([20, 30, 40, 80], intervals.tokens_to_share(0.5), 250),  # and a quarter from 40 to 80
        ([20, 80, 10, 10], intervals.tokens_to_share(0.5), 50),  # the first time counts
        ([20, 30, 50, 65], intervals.tokens_to_share(0.9), NEVER),  # 74 is never seen
        ([20, 10, 5, 1], intervals.tokens_to_share(0.5), NEVER),
        ([90, 30, 50, 65], intervals.gap_share, None),  # there is no gap
    ],
)
def test_statistics_are_as_worked_out_by_hand(
    values: list[float], statistic: Statistic, number: float | None
) -> None:
    points = {n: Point(y, tokens=TOKENS[n]) for n, y in enumerate(values)}
    result = estimate([make_curve(RUN, SCORE, {None: Point(80)} | points)], statistic)
    assert result == Estimate(number if number is None else pytest.approx(number))


def at(value: float, replicates: list[float] | None = None) -> Curve:
    drawn = None
    if replicates is not None:
        many = np.repeat(replicates, 1000)
        drawn = many[:, None], np.full(len(many), math.nan)
    return make_curve(RUN, SCORE, {0: Point(value, tokens=0)}, drawn)


def test_questions_that_all_lengths_share_are_drawn_once() -> None:
    scores = {index: 100.0 * (index % 3 == 0) for index in range(30)}
    for task, narrower in (("qa_1", False), ("vt", True)):
        cells = [(task, 512), (task, 1024)]
        widths = []
        for count in (1, 2):
            weights = dict.fromkeys(cells[:count], 1 / count)
            drawn = intervals.resample_examples(
                [dict.fromkeys(cells, scores)], None, weights, "ruler"
            )
            assert drawn is not None
            widths.append(drawn[0].std())
        assert (widths[1] < 0.8 * widths[0]) == narrower
        assert narrower or widths[1] == widths[0]


FIFTY = at(50, [50])


@pytest.mark.parametrize(
    ("curves", "baselines", "expected"),
    [
        # Better by 10 on every resample: difficulty that both share cancels out.
        ([at(60, [50, 60, 70])], [at(50, [40, 50, 60])], Estimate(10, 10, 10, 1)),
        ([at(60)], [FIFTY], Estimate(10, None, None, 1)),
        # Two seeds, 0 and 20: a standard error of 10, times 12.71 (Student's t, one degree).
        ([FIFTY, at(70, [70])], [FIFTY] * 2, Estimate(10, -117, 137, 2)),
        # Three, 5, 6 and 6: a standard error of 1/3, times 4.30.
        ([at(55, [55]), *[at(56, [56])] * 2], [FIFTY] * 3, Estimate(17 / 3, 4.23, 7.10, 3)),
        ([at(56, [56])] * 3, [FIFTY] * 3, Estimate(6, 6, 6, 3)),
        ([at(math.inf, [math.inf]), FIFTY], [FIFTY] * 2, Estimate(math.inf, None, None, 2)),
    ],
)
def test_differences_have_intervals_over_seeds_and_examples(
    curves: list[Curve], baselines: list[Curve], expected: Estimate
) -> None:
    found = estimate(curves, intervals.value_at(0), baselines)
    assert (found.value, found.num_seeds) == (pytest.approx(expected.value), expected.num_seeds)
    assert (found.low is None) == (expected.low is None)
    if found.low is not None:
        assert [found.low, found.high] == pytest.approx([expected.low, expected.high], rel=0.04)


def test_an_interval_over_three_seeds_holds_the_mean_of_all_in_19_of_20_studies() -> None:
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        seeds = generator.normal(50, 10, size=3)
        found = estimate([at(value, [value]) for value in seeds], intervals.value_at(0))
        held += (found.low or 0.0) <= 50 <= (found.high or 0.0)
    assert 0.92 <= held / 200 <= 0.98


CELL = ("task", 512)


def test_paired_replicates_cancel_shared_difficulty() -> None:
    step_0 = {CELL: {i: 100.0 * (i < 40) for i in range(100)}}
    later = {CELL: {i: 100.0 * (i < 60) for i in range(100)}}
    drawn = intervals.resample_examples([step_0, later], later, {CELL: 1.0}, "niah")
    assert drawn is not None
    values, dense = drawn
    assert (dense == values[:, 1]).all()  # the same answers, so the same draws
    # The gain is the number of the 20 examples drawn, with n p (1 - p) = 100 x .2 x .8: 4 points.
    gains = values[:, 1] - values[:, 0]
    assert gains.mean() == pytest.approx(20, abs=0.5)
    assert gains.std() == pytest.approx(4, abs=0.3)
    assert (gains >= 0).all()
