"""recipes/recover.py in a process that can be killed at an exact point.

    python recover_program.py FOLDER POINT ARGUMENT...

SIGKILL from inside just before the POINT-th operation on a file below FOLDER; 0: never, and the
numbers of the operations on each stage's files are printed at the end.
"""

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bosch.recipes import recover
from tests.kill_points import OPERATIONS, watch_operations

# Of the preset smoke; the first two are those that a short run of the tests kills.
STAGES = (
    "mask",
    "train",
    "calibration",
    "eval-dense",
    "model",
    "eval/step-000000",
    "tokens",
    "eval/step-000008",
    "report",
)


def stage_of(path: str) -> str | None:
    """In runs/shared, or in the run's own folder."""
    *_, inside = path.partition("runs/")
    *_, own = inside.partition("/")
    return next((stage for stage in STAGES if own.startswith(stage)), None)


def run(folder: str, point: int, arguments: Sequence[str]) -> None:
    seen = watch_operations(folder, "runs", at=point)
    places: dict[str, list[int]] = {}

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        is_beat = threading.current_thread().name == "heartbeat"
        if event in OPERATIONS and not is_beat and (stage := stage_of(str(arguments[0]))):
            places.setdefault(stage, []).append(seen[0])

    sys.addaudithook(note)
    os.chdir(folder)
    recover.main(arguments)
    print(f"operations {json.dumps(places)}", flush=True)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
