"""A search in processes that tests kill: stage 1 and swaps on a tiny model, with a journal."""

import json
import multiprocessing.connection
import os
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bosch.search.journal import FILE
from tests.fork_server import PATIENCE, launch_environment, start

COSTS = ("seconds", "layer_forwards", "check")  # what a kill may change in a journal
RESULT = "result.json"


def launch(folder: Path, world: int = 1, **options: Any) -> list[BaseProcess]:
    """Start all ranks of a search. Options: see `main`."""
    folder.mkdir(parents=True, exist_ok=True)
    return [start(main, folder, variables, options) for variables in launch_environment(world)]


def wait(ranks: list[BaseProcess]) -> list[int | None]:
    """Their exit codes. If one dies, the others are killed, as a launcher does."""
    multiprocessing.connection.wait([rank.sentinel for rank in ranks], PATIENCE)
    for rank in ranks:
        rank.join(0 if any(each.exitcode for each in ranks) else PATIENCE)
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def run(folder: Path, world: int = 1, **options: Any) -> None:
    codes = wait(launch(folder, world, **options))
    assert codes == [0] * world, (folder / "log-0").read_text()


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / RESULT).read_text())
    return content


def journal(folder: Path) -> list[dict[str, Any]]:
    """The lines of the journal, without their costs."""
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return [{name: line[name] for name in line if name not in COSTS} for line in lines]


# --------------------------------------------------------------------------------- in the process


def main(folder: Path, environment: dict[str, str], options: dict[str, Any]) -> None:
    """options: `kill_at`, the evaluation at whose line the process kills itself, before it is
    written, `torn` in the middle, or `written`, after it; `limits`, `accelerations` and
    `masks_at_once`.
    """
    os.environ.update(environment)
    log = (folder / f"log-{environment['RANK']}").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    import torch

    from bosch.run.group import is_first
    from bosch.search import evaluations, scorer
    from tests import search_cases as cases
    from tests.attention_matrices import inputs_of

    torch.set_num_threads(1)
    model = cases.small_model()
    calibration = cases.answered_calibration(model)
    settings: Any = SimpleNamespace(Settings=dict)
    inputs = inputs_of(settings, model, calibration, folder, window_tokens=cases.WINDOW)
    accelerations = scorer.Accelerations(**options.get("accelerations", {}))
    limits = options.get("limits", {}) | {"masks_at_once": options.get("masks_at_once", 1)}
    name, facts = "accuracy+probability", {"method": "toy"}
    with evaluations.open_objective(inputs, name, facts, accelerations, **limits) as objective:
        _kill_at(objective.journal, options.get("kill_at"), options.get("moment", "before"))
        searches = (cases.stage_one, cases.swap_search, cases.search_three_at_once)
        masks = [search(objective) for search in searches]
        if is_first():
            content = {"found": masks, "evaluations": objective.evaluations()}
            (folder / RESULT).write_text(json.dumps(content))
    sys.stdout.flush()


def _kill_at(journal: Any, number: int | None, moment: str) -> None:
    append = journal.append

    def append_or_die(line: dict[str, Any]) -> None:
        if line.get("number") != number or journal._file is None:
            append(line)
            return
        if moment == "torn":
            journal._file.write(json.dumps(line).encode()[: 20 + number])
            journal._file.flush()
        if moment == "written":
            append(line)
        os.kill(os.getpid(), signal.SIGKILL)

    if number is not None:
        journal.append = append_or_die
