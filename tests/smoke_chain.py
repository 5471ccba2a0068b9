"""The smoke chain in a forked process, killed at an exact point if a test asks for it, and all that
such a run was made for."""

import faulthandler
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from transformers import GenerationMixin

from bosch.recipes import recover
from bosch.run.errors import exit_on_user_error
from tests import fork_server
from tests.kill_points import OPERATIONS, watch_operations
from tests.pictures import save_a_pixel

CHAIN = ("--preset", "smoke", "--method", "bosch")
RUN = Path("runs") / "tiny-qwen3-2layer-bosch-r0.75"
# Of the preset smoke, beginnings of folder names in the run's folder or in runs/shared; the first
# two are those that a short run of the tests kills.
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
    "tb",
    "examples",
)
# A run's folder, and the numbers of the operations on each stage's files.
Undisturbed = tuple[Path, dict[str, list[int]]]


# --- runs ---


def start(
    folder: Path,
    kill_at: int = 0,
    sends: str = "SIGKILL",
    arguments: Sequence[str] = CHAIN,
    copies: Mapping[int, str] | None = None,
    variables: Mapping[str, str] | None = None,
    draws: bool = False,
) -> tuple[int, str]:
    """Exit code and output of a run in `folder`; a negative code is a signal. The run sends itself
    a signal just before operation number `kill_at` on a file below the folder (0: never).

    copies: by number of an operation, a folder to which the run copies itself before it, just as a
    kill would have left it.
    draws: whether pictures have more than a pixel, which takes a third of a run's time.
    """
    log = folder.with_suffix(".log")
    how = kill_at, sends, tuple(arguments), copies, variables or {}, draws
    process = fork_server.start(_run, str(folder), str(log), *how)
    if not connection.wait([process.sentinel], fork_server.PATIENCE):  # it hangs, and prints where
        os.kill(process.pid or 0, signal.SIGABRT)
    process.join()
    return process.exitcode or 0, log.read_text("utf-8", "replace")


def _run(
    folder: str,
    log: str,
    kill_at: int,
    sends: str,
    arguments: Sequence[str],
    copies: Mapping[int, str] | None,
    variables: Mapping[str, str],
    draws: bool,
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(2)
    os.chdir(folder)
    os.environ.update(variables)
    for stream in (sys.stdout, sys.stderr):  # Python has read the variable already
        stream.reconfigure(encoding=variables.get("PYTHONIOENCODING", "utf-8"), errors="strict")
    sys.argv = ["recover.py", *arguments]
    seen = watch_operations(folder, "runs", at=kill_at, sends=sends)
    if not draws:
        Figure.savefig = save_a_pixel
    if copies is not None:
        left = dict(copies)

        def copy(*_: object) -> None:
            if seen[0] in left:
                subprocess.run(["cp", "-r", folder, left.pop(seen[0])], check=True)

        sys.addaudithook(copy)
    places: dict[str, list[int]] = {}
    models: dict[str, int] = {}  # in memory when a stage first touches a file
    gc.disable()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        is_counted = threading.current_thread().name != "wall time"
        if event in OPERATIONS and is_counted and (stage := stage_of(str(arguments[0]))):
            if stage not in places:
                alive = [each for each in gc.get_objects() if isinstance(each, GenerationMixin)]
                models[stage] = len(alive)
            places.setdefault(stage, []).append(seen[0])

    sys.addaudithook(note)
    exit_on_user_error(lambda: recover.main(arguments), debug=False)
    print(f"models {json.dumps(models)}\noperations {json.dumps(places)}", flush=True)


def stage_of(path: str) -> str | None:
    """In runs/shared, or in the run's own folder."""
    *_, inside = path.partition("runs/")
    *_, own = inside.partition("/")
    return next((stage for stage in STAGES if own.startswith(stage)), None)


def operations_of(output: str) -> dict[str, list[int]]:
    """Of a run that was not killed: the numbers of the operations on each stage's files."""
    places: dict[str, list[int]] = json.loads(output.rsplit("operations ", 1)[1])
    return places


# --- results ---


def results(run: Path) -> dict[str, Any]:
    """All that a run was made for: masks, weights, losses, answers, scores and curves. What says
    how long things took is left out."""
    patterns = ("mask/mask.json", "*/model.safetensors", "train/step-*/model.safetensors")
    patterns += ("eval/**/*.jsonl", "eval/**/scores.json", "report/*.jsonl", "model/config.json")
    shared = ("calibration-*/*.jsonl", "tokens-*/*.bin", "eval-*/*/*.json*")
    found: dict[str, Any] = {
        path.relative_to(run.parent).as_posix(): path.read_bytes()
        for place, names in ((run, patterns), (run.parent / "shared", shared))
        for pattern in names
        for path in place.glob(pattern)
    }
    for name in [name for name in found if name.endswith("recovery.jsonl")]:
        found[name] = re.sub(rb', "hours": [^,}]+', b"", found[name])
    found["losses"] = [
        {name: value for name, value in json.loads(line).items() if "second" not in name}
        for line in (run / "train" / "metrics.jsonl").read_text().splitlines()
    ]
    for line in found["losses"]:
        line.pop("check", None)  # of the times too
        line.pop("time", None)
        line.pop("tflops_per_device", None)
    (dense,) = (run.parent / "shared").glob("dense-*")
    for folder in (run / "tb", dense):
        curves = points(folder)
        found[f"TensorBoard {folder.name}"] = {
            tag: values for tag, values in curves.items() if not re.search("second|flops", tag)
        }
    return found


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar in a folder's event files, with nothing purged or downsampled."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), {"scalars": 0}, purge_orphaned_data=False).Reload()
    return {
        tag: [(event.step, round(event.value, 4)) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }
