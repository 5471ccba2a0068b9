"""Tokens and a learned mask as the recipe makes them, in processes that tests kill.

Processes are forked from one that has imported everything, as in training_program.py.
"""

import multiprocessing
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults.training_program import Attempt, watch_operations

PRELOADED = ["training.loop", "recipes.search_mask", "tests.faults.learned_mask_program"]


def launch(run: Path, world: int = 1, kill_at: int | None = None, **settings: Any) -> Attempt:
    """Start all ranks. kill_at: SIGKILL of rank 0 before its n-th operation on a file of the stage
    `mask`. settings: of the method."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    run.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    number = len(list(run.parent.glob(f"{run.name}-log-*")))
    ranks, logs = [], []
    for rank in range(world):
        logs.append(run.with_name(f"{run.name}-log-{number + rank}"))
        logs[-1].touch()
        environment = {
            "RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_RANK": rank,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }
        arguments = (run, logs[-1], environment, kill_at if rank == 0 else None, settings)
        ranks.append(context.Process(target=main, args=arguments, daemon=True))
        ranks[-1].start()
    return Attempt(ranks, logs)


def main(
    run_path: Path,
    log: Path,
    environment: dict[str, Any],
    kill_at: int | None,
    settings: dict[str, Any],
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update({name: str(value) for name, value in environment.items()})

    import torch

    from bosch import progress
    from bosch.methods import consa
    from bosch.run_folder import RunFolder
    from recipes import prepare_tokens, presets, search_mask

    torch.set_num_threads(1)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    progress.set_up(rank)
    config = presets.smoke()
    train = replace(config.train, checkpoint_steps=3)
    data = replace(config.data, tokens=8_192)
    config = replace(config, method="consa", ratio=0.5, train=train, data=data)
    method_settings = consa.Settings(
        **{"token_share": 1.0, "gate_learning_rate": 1.0, "steps": 12, "batch_sequences": 1}
        | settings
    )
    tokens = prepare_tokens.build(config)
    mask = search_mask.make_stage(config, method_settings, None, tokens)
    with RunFolder(run_path, rank, world, progress.say) as run:
        run.complete(tokens)
        operations = watch_operations(run_path / "mask", {"kill_at": kill_at})
        run.complete(mask)
    print(f"operations: {operations[0]}", flush=True)
