"""How far and how fast a score recovers, worked out by hand; and the intervals around it."""

import math

import numpy as np
import pytest

from eval.report import recovery
from eval.report.recovery import NEVER, Curve, Estimate, Replicates, estimate, interval
from eval.report.resampling import NUM_REPLICATES, draw_from_errors, resample_examples

TOKENS = np.array([0.0, 100.0, 200.0, 400.0])


def make_curve(values: list[float], dense: float, replicates: Replicates | None = None) -> Curve:
    errors = np.full(4, math.nan)
    return Curve((0, 1, 2, 4), TOKENS, np.array(values), errors, dense, math.nan, replicates)


def test_gap_share_is_the_part_of_the_gap_won_back() -> None:
    # From 20 to 65 of a gap from 20 to 80.
    assert estimate(make_curve([20, 30, 50, 65], 80), recovery.gap_share) == Estimate(0.75)


@pytest.mark.parametrize("dense", [20, 10, math.nan])
def test_there_is_no_share_of_a_gap_that_is_not_there(dense: float) -> None:
    curve = make_curve([20, 30, 50, 65], dense)
    assert estimate(curve, recovery.gap_share).value is None
    assert estimate(curve, recovery.tokens_to_share(TOKENS, 0.5)).value is None


@pytest.mark.parametrize(
    ("values", "share", "tokens"),
    [
        ([20, 30, 50, 65], 0.5, 200),  # 50 is half way from 20 to 80, at a checkpoint
        ([20, 30, 40, 80], 0.5, 250),  # 50 is a quarter of the way from 40 to 80
        ([20, 30, 40, 60], 0.5, 300),
        ([20, 80, 10, 10], 0.5, 50),  # the first time counts, though it falls again
        ([20, 30, 50, 65], 0.9, NEVER),  # 74 is never seen
        ([20, 10, 5, 1], 0.5, NEVER),
    ],
)
def test_tokens_to_a_share_lie_on_lines_between_checkpoints(
    values: list[float], share: float, tokens: float
) -> None:
    found = estimate(make_curve(values, 80), recovery.tokens_to_share(TOKENS, share))
    assert found.value == pytest.approx(tokens)


def test_mean_score_is_the_area_over_its_width() -> None:
    # Trapezoids 25 x 100 + 40 x 100 + 57.5 x 200 = 18,000 over 400 tokens.
    curve = make_curve([20, 30, 50, 65], 80)
    assert estimate(curve, recovery.mean_score(TOKENS)).value == pytest.approx(45)


def test_mean_score_may_begin_between_checkpoints() -> None:
    curve = Curve((0, 1, 2), np.array([0.0, 100, 300]), np.array([0.0, 50, 90]), np.zeros(3))
    found = estimate(curve, recovery.mean_score(curve.tokens, until=200, since=50))
    assert found.value == pytest.approx((50 * (25 + 50) / 2 + 100 * (50 + 70) / 2) / 150)
    assert estimate(curve, recovery.mean_score(curve.tokens, until=50, since=60)).value is None


def test_mean_score_may_end_between_checkpoints() -> None:
    # Up to 300 the curve is at 57.5: 2,500 + 4,000 + 53.75 x 100 = 11,875 over 300 tokens.
    curve = make_curve([20, 30, 50, 65], 80)
    found = estimate(curve, recovery.mean_score(TOKENS, until=300))
    assert found.value == pytest.approx(11_875 / 300)


def test_interval_is_the_middle_of_the_replicates_with_those_never_reached_on_top() -> None:
    numbers = np.arange(1.0, 201.0)
    assert interval(numbers) == (6, 195)  # 2.5 % of 200 are cut on either side
    assert interval(np.where(numbers > 150, NEVER, numbers)) == (6, NEVER)


def test_no_interval_where_many_replicates_have_no_value() -> None:
    numbers = np.arange(1.0, 201.0)
    assert interval(np.where(numbers <= 11, math.nan, numbers)) == (None, None)
    assert interval(np.where(numbers <= 10, math.nan, numbers))[0] is not None


def test_differences_of_equal_curves_are_zero_with_their_interval() -> None:
    generator = np.random.default_rng(0)
    drawn = Replicates(generator.normal(50, 5, (100, 4)), generator.normal(80, 5, 100), "made up")
    curve = make_curve([20, 30, 50, 65], 80, drawn)
    found = recovery.estimate_difference(curve, curve, recovery.final_value)
    assert found == Estimate(0, 0, 0)


# ------------------------------------------------------------------------------------ replicates


CELL = ("task", 512)


def test_paired_replicates_cancel_what_is_hard_for_all() -> None:
    step_0 = {CELL: {i: 100.0 * (i < 40) for i in range(100)}}
    later = {CELL: {i: 100.0 * (i < 60) for i in range(100)}}
    drawn = resample_examples([step_0, later], later, {CELL: 1.0}, "niah")
    assert drawn is not None
    assert (drawn.dense == drawn.values[:, 1]).all()  # the same answers, so the same draws
    # The gain is the number of the 20 examples drawn, with n p (1 - p) = 100 x .2 x .8: 4 points.
    gains = recovery.gain(drawn.values, drawn.dense)
    assert gains.mean() == pytest.approx(20, abs=0.5)
    assert gains.std() == pytest.approx(4, abs=0.3)
    assert (gains >= 0).all()


def test_replicates_are_the_same_in_every_run_and_differ_between_cells() -> None:
    samples = {cell: {i: 100.0 * (i % 2) for i in range(50)} for cell in (CELL, ("other", 512))}
    one, again = (resample_examples([samples], None, {CELL: 1.0}, "niah") for _ in range(2))
    other = resample_examples([samples], None, {("other", 512): 1.0}, "niah")
    assert one is not None
    assert again is not None
    assert other is not None
    assert (one.values == again.values).all()
    assert not (one.values == other.values).all()
    assert np.isnan(one.dense).all()


def test_points_that_answered_other_examples_are_not_paired() -> None:
    first = {CELL: {0: 100.0, 1: 0.0}}
    assert resample_examples([first, {CELL: {0: 100.0}}], None, {CELL: 1.0}, "niah") is None
    assert resample_examples([first, {}], None, {CELL: 1.0}, "niah") is None


def test_without_examples_points_are_drawn_from_their_errors() -> None:
    values, errors = np.array([20.0, 60.0]), np.array([3.0, 4.0])
    drawn = draw_from_errors(values, errors, 80.0, 2.0, "niah/average", "run")
    assert drawn is not None
    assert drawn.values.shape == (NUM_REPLICATES, 2)
    # Independent errors of 3 and 4 make one of 5.
    assert recovery.gain(drawn.values, drawn.dense).std() == pytest.approx(5, rel=0.05)
    assert drawn.dense.std() == pytest.approx(2, rel=0.05)
    errors[0] = math.nan
    assert draw_from_errors(values, errors, 80.0, 2.0, "niah/average", "run") is None
