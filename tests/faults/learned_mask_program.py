"""Tokens and a learned mask, made as by the recipe, on one rank or several."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults.training_program import Attempt, enter, start_ranks


def launch(run: Path, world: int) -> Attempt:
    """Start all ranks."""
    run.parent.mkdir(parents=True, exist_ok=True)
    return start_ranks(main, run, world, {})


def main(run_path: Path, log: Path, environment: dict[str, str], _: dict[str, Any]) -> None:
    enter(log, environment)

    import torch

    from bosch.data import packed
    from bosch.methods import consa
    from bosch.recipes import presets, search_mask
    from bosch.run import progress
    from bosch.run.folder import RunFolder

    torch.set_num_threads(1)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    progress.set_up(rank)
    config = presets.smoke()
    train = replace(config.train, checkpoint_steps=3)
    data = replace(config.data, tokens=8_192)
    config = replace(config, method="consa", ratio=0.5, train=train, data=data)
    method_settings = consa.Settings(
        token_share=1.0, gate_learning_rate=1.0, steps=12, batch_sequences=2
    )
    tokens = packed.build(config)
    mask = search_mask.build(config, None, tokens, method_settings)
    with RunFolder(run_path, rank, world, progress.say) as run:
        run.complete(tokens)
        run.complete(mask)
