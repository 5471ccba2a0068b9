"""The guards alone: what they skip, and what they remember."""

import math
import re

import pytest

from bosch.training.guards import HISTORY_STEPS, Guards, TrainingFailedError

BATCH = [7, 3]


def full_history(spike: str = "log") -> Guards:
    """Losses that swing between 2 and 2.2: mean 2.1, standard deviation 0.1."""
    guards = Guards(spike)
    for step in range(HISTORY_STEPS):
        assert guards.judge(step + 1, 2.0 + 0.2 * (step % 2), 1.0, BATCH) is None
    return guards


def test_three_in_a_row_end_training_and_a_good_step_in_between_does_not() -> None:
    guards = Guards()
    for step, loss in enumerate([math.nan, math.nan, 2.0, math.nan, math.nan], 1):
        guards.judge(step, loss, 1.0, BATCH)
    assert guards.skipped == 4
    with pytest.raises(TrainingFailedError, match=r"3 steps .* step 6 .* 7 3"):
        guards.judge(6, math.nan, 1.0, BATCH)


def test_a_spike_is_logged_and_skipped_only_if_the_setting_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "bosch")
    assert full_history("log").judge(200, 2.8, 1.0, BATCH) is None
    assert re.search(r"step 200: .*loss 2\.8 .*2\.1", caplog.text)
    assert full_history("skip").judge(200, 2.8, 1.0, BATCH) == "spike"
    assert full_history("skip").judge(200, 2.6, 1.0, BATCH) is None  # 5 sigma
    assert full_history("skip").judge(200, 2.1, 9.0, BATCH) == "spike"  # of the gradient
    young = Guards("skip")  # the first steps are never spikes
    assert [young.judge(step, 2.0 * step**9, 1.0, BATCH) for step in (1, 2)] == [None, None]


def test_a_loss_that_stays_on_a_new_level_is_not_skipped_for_ever() -> None:
    guards = full_history("skip")
    judged = [guards.judge(200 + step, 3.5, 1.0, BATCH) for step in range(5)]
    # By hand: with three of them among 128, the mean is 2.13 and the standard deviation 0.24.
    assert judged == ["spike", "spike", "spike", None, None]


def test_what_guards_remember_goes_through_a_checkpoint() -> None:
    before = full_history("skip")
    before.judge(200, math.nan, 1.0, BATCH)
    after = Guards("skip")
    after.load_state_dict(before.state_dict())
    assert (after.skipped, after.in_a_row) == (1, 1)
    assert after.judge(201, 2.8, 1.0, BATCH) == "spike"
