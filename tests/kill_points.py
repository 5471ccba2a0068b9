"""Processes that end themselves at an exact point: just before their n-th operation on a file of a
folder.

An audit hook of Python's sees every operation, so that tests reach each point between two of them
without a clock. What heartbeats write is not counted, since it depends on the time.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

POINT = "tests.point"  # sys.audit(POINT, folder): a point that is no operation
OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.truncate", "shutil.rmtree", POINT)


def watch_operations(
    *places: Path | str,
    at: int | None = None,
    sends: str = "SIGKILL",
    to: str = "itself",
    operations: Sequence[str] = OPERATIONS,
) -> list[int]:
    """The number of operations so far, below any of the places. Before the one numbered `at` the
    process sends a signal to itself, or to its parent."""
    seen = [0]
    begins = tuple(map(str, places))

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in operations or not str(arguments[0]).startswith(begins):
            return
        if threading.current_thread().name == "heartbeat":
            return
        seen[0] += 1
        if seen[0] == at:
            os.kill(os.getppid() if to == "parent" else os.getpid(), signal.Signals[sends])

    sys.addaudithook(count)
    return seen
