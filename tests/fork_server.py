"""Processes forked from one that has already imported everything (the fork server of
`multiprocessing`), so that a rank starts in one second instead of ten.

A process has only one fork server, and its first user decides what it preloads. So the list is kept
here, for all programs.
"""

import atexit
import gc
import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

PRELOADED = [
    "bosch.recipes.search_mask",
    "bosch.training.loop",
    "bosch.recipes.recover",
    "bosch.eval.report.tensorboard",
    "bosch.eval.runner",
    "bosch.eval.report.page",
    "bosch.search.pictures",
    "bosch.search.finish",
    "tests.plain_training",
    "tests.search_cases",
    "tests.faults.search_program",
]
PATIENCE = 600.0  # seconds to wait for a process before the test fails

_held: list[socket.socket] = []


def start(program: Callable[..., None], *arguments: object) -> BaseProcess:
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process: BaseProcess = context.Process(target=_run, args=(program, *arguments), daemon=True)
    process.start()
    return process


def _run(program: Callable[..., None], *arguments: object) -> None:
    gc.freeze()  # garbage is not looked for in what was imported, which takes .3 s each time
    program(*arguments)


def launch_environment(world: int) -> list[dict[str, str]]:
    """The environment of each rank as a launcher sets it. The port stays bound here, so that it is
    not given to another process before rank 0 listens on it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("localhost", 0))
    _held.append(holder)
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "localhost"}
    shared["MASTER_PORT"] = str(holder.getsockname()[1])
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


@atexit.register
def _let_go() -> None:
    for holder in _held:
        holder.close()
