"""Two processes learn the gates of one, up to the order of sums."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bosch.run.tensorboard import METRICS, read_metrics
from tests.faults.training_program import enter, start_ranks


def gates_of(row: dict[str, Any]) -> dict[str, float]:
    """The mean gate of each layer after a step."""
    return {name: value for name, value in row.items() if name.startswith("gates/layer")}


@pytest.mark.faults
def test_two_processes_learn_the_same_gates(tmp_path: Path) -> None:
    """The first 10 steps agree within 1e-5: fp32 sums in another order."""
    histories = []
    for world in (1, 2):
        run = tmp_path / f"ranks-{world}"
        attempt = start_ranks(learn, run, world, {})
        assert attempt.wait() == [0] * world, attempt.output()
        histories.append([gates_of(row) for row in read_metrics(run / "mask" / METRICS)])
    alone, together = histories
    assert max(alone[9].values()) - min(alone[9].values()) > 0.01  # they moved
    for gates, others in zip(alone[:10], together[:10], strict=True):
        assert gates == pytest.approx(others, abs=1e-5)


def learn(run_path: Path, log: Path, environment: dict[str, str], _: dict[str, Any]) -> None:
    enter(log, environment)

    import torch

    from bosch.data import calibration_stage, tokens_stage
    from bosch.eval.own_words import rewording
    from bosch.methods import consa
    from bosch.recipes import presets
    from bosch.run import progress
    from bosch.run.folder import RunFolder
    from bosch.search import mask_stage
    from bosch.training.learner import make_learning

    torch.set_num_threads(1)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    progress.set_up(rank)
    config = presets.smoke()
    train = replace(config.train, checkpoint_steps=3)
    data = replace(config.data, tokens=8_192)
    config = replace(config, method="consa", ratio=0.5, sink="static", train=train, data=data)
    method_settings = consa.Settings(
        token_share=1.0, gate_learning_rate=1.0, steps=12, batch_sequences=2
    )
    settings = calibration_stage.settings_of(config)
    calibration = calibration_stage.stage(config.model, settings, rewording)  # for the sinks
    tokens = tokens_stage.stage_or_reused(config)
    mask = mask_stage.stage(
        config, calibration_stage.read_set, make_learning, calibration, tokens, method_settings
    )
    with RunFolder(run_path, rank, world, progress.say) as run:
        for stage in (calibration, tokens, mask):
            run.complete(stage)
