"""Schedules and learning rates, against the paper or computed by hand; and the guards alone: what
they skip, and what they remember."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from bosch.config import TrainConfig
from bosch.recipes import presets
from bosch.run.errors import UserError
from bosch.training.guards import HISTORY_STEPS, Guards
from bosch.training.schedule import TrainSchedule, learning_rate, make_schedule


def schedule_of(settings: TrainConfig, tokens: int, seq_len: int, **more: Any) -> TrainSchedule:
    given = {"evaluated_shares": (0.0, 1.0), "world_size": 1, "device_type": "cpu"}
    return make_schedule(settings, tokens, seq_len, **(given | more))


def test_the_papers_schedule() -> None:
    """1,192 steps of 2^21 tokens; 119 of warm-up; checkpoints at 0, .65, 1.3, 1.95 and 2.5B."""
    config = presets.paper()
    shares, data = config.eval.checkpoints, config.data
    cluster = {"evaluated_shares": shares, "world_size": 8, "device_type": "cuda"}
    schedule = schedule_of(config.train, data.tokens, data.sequence_length, **cluster)
    assert (schedule.num_steps, schedule.batch_tokens) == (1192, 2**21)
    assert "(1 x 8 sequences on each of 8 ranks)" in schedule.describe()
    billions = [round(schedule.tokens_at(step) / 1e9, 2) for step in schedule.evaluated_steps]
    assert billions == [0.0, 0.65, 1.3, 1.95, 2.5]
    rates = [learning_rate(config.train, step, schedule.num_steps) for step in range(1192)]
    assert rates.index(max(rates)) == 118  # the last of the warm-up
    assert max(rates) == 1e-5


def test_rate_rises_in_a_line_and_falls_down_a_cosine_to_the_floor() -> None:
    settings = TrainConfig(peak_learning_rate=4.0, warmup_share=0.2, floor_share=0.25)
    rates = [learning_rate(settings, step, 20) for step in range(21)]
    assert rates[:4] == [1.0, 2.0, 3.0, 4.0]
    assert rates[4] == 4.0
    assert rates[12] == pytest.approx(2.5)  # half-way down: between 4 and the floor of 1
    assert rates[20] == pytest.approx(1.0)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    without_warm_up = TrainConfig(peak_learning_rate=1.0, warmup_share=0.0)
    assert learning_rate(without_warm_up, 0, 4) == 1.0


SIXTY_FOUR = TrainConfig(batch_sequences=64)


def test_batch_is_shared_out_over_ranks_and_micro_batches_that_fit_the_device() -> None:
    schedule = schedule_of(replace(SIXTY_FOUR, micro_batch_sequences=2), 10**6, 128, world_size=16)
    assert "(2 x 2 sequences on each of 16 ranks)" in schedule.describe()
    fits = {("cuda", 32_768): 1, ("cuda", 65_536): 1, ("cuda", 4_096): 8, ("cpu", 1_024): 8}
    for (device, seq_len), micro in fits.items():
        schedule = schedule_of(SIXTY_FOUR, 10**7, seq_len, device_type=device)
        assert schedule.micro_batch_sequences == micro


def test_a_schedule_that_is_impossible_is_refused() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        # the paper's 1.7B on two nodes: 128 sequences
        ({"micro_batch_sequences": 8}, {"world_size": 16}, "micro_batch_sequences 8 .* 1, 2, 4"),
        ({}, {"world_size": 5}, "train.batch_sequences .* multiple of 5"),
        ({}, {"tokens": 64 * 128 - 1}, "8,191 tokens .* 64 sequences of 128"),
        # No checkpoint could ever end it.
        ({"until": "recovered"}, {"evaluated_shares": (0.0, 0.05, 1.0)}, "no checkpoint .* 12 "),
    ]
    for settings, more, named in cases:
        given = {"tokens": 10**6, "seq_len": 128} | more
        with pytest.raises(UserError, match=named):
            schedule_of(replace(SIXTY_FOUR, **settings), **given)


# --- guards ---

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
    with pytest.raises(UserError, match=r"3 steps .* step 6 .* 7 3"):
        guards.judge(6, math.nan, 1.0, BATCH)


def test_a_spike_is_logged_and_skipped_if_so_set(caplog: pytest.LogCaptureFixture) -> None:
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
