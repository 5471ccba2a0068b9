"""Processes that kill themselves at an exact point: just before their n-th file operation in a
folder.

An audit hook of Python sees every operation, so tests reach each point between two operations
without a clock. What the thread that saves the wall time does is not counted.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

POINT = "tests.point"  # sys.audit(POINT, path): a point to be killed at that is no operation
OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.truncate", "shutil.rmtree", POINT)


def watch_operations(
    *places: Path | str, at: int | None = None, sends: str = "SIGKILL", to: str = "itself"
) -> list[int]:
    """The number of operations so far below any of the places. Before operation number `at`, the
    process sends a signal to itself or to its parent."""
    num_operations = [0]
    prefixes = tuple(map(str, places))

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in OPERATIONS or not str(arguments[0]).startswith(prefixes):
            return
        if threading.current_thread().name == "wall time":
            return
        num_operations[0] += 1
        if num_operations[0] == at:
            os.kill(os.getppid() if to == "parent" else os.getpid(), signal.Signals[sends])

    sys.addaudithook(count)
    return num_operations
