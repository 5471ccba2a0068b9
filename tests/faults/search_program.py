"""A search in processes that tests kill: stage 1 and swaps on a tiny model."""

import json
import multiprocessing.connection
import os
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bosch.run.files import read_lines
from bosch.search.outcomes import FILE
from tests.fork_server import PATIENCE, launch_environment, start

RECORD = ("stage", "z", "threshold", "value", "exact")  # of a line, what no kill may change
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
    return json.loads((folder / RESULT).read_text())


def evaluations(folder: Path) -> list[list[Any]]:
    """The record of each complete line."""
    texts = [text for text in (folder / FILE).read_text().splitlines() if text[-1] == "}"]
    return [[line[name] for name in RECORD] for line in map(json.loads, texts)]


def main(folder: Path, environment: dict[str, str], options: dict[str, Any]) -> None:
    """options: `kill_at`, the evaluation at whose line the process kills itself, before it is
    written, `torn` in the middle, or `written`, after it; and settings of the search."""
    os.environ.update(environment)
    log = (folder / f"log-{environment['RANK']}").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    import torch

    from bosch.run.dist import Ranks
    from bosch.search.score import make_evaluator
    from bosch.search.settings import SearchSettings
    from tests import search_cases as cases
    from tests.attention_matrices import inputs_of

    torch.set_num_threads(1)
    _kill_at(folder / FILE, options.pop("kill_at", None), options.pop("moment", "before"))
    model = cases.small_model()
    calibration = cases.answered_calibration(model)
    method: Any = SimpleNamespace(Settings=dict)
    inputs = inputs_of(method, model, calibration, folder, window_tokens=cases.WINDOW)
    settings = SearchSettings(objective="accuracy+probability", **options)
    evaluator = make_evaluator(inputs, settings)
    searches = (cases.stage_one, cases.swap_search, cases.search_three_at_once)
    masks = [search(evaluator.score) for search in searches]
    if Ranks.current().rank == 0:
        content = {"found": masks, "evaluations": len(evaluator.values)}
        (folder / RESULT).write_text(json.dumps(content))
    sys.stdout.flush()


def _kill_at(path: Path, number: int | None, moment: str) -> None:
    from bosch.search.outcomes import Outcomes

    add = Outcomes.add
    written = len(read_lines(path))

    def add_or_die(self: Outcomes, *arguments: Any, **more: Any) -> None:
        nonlocal written
        before = path.read_bytes()
        if self._path == path and (written := written + 1) == number:
            if moment != "before":
                add(self, *arguments, **more)
            if moment == "torn":
                os.truncate(path, len(before) + 20 + number)
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, *arguments, **more)

    if number is not None:
        Outcomes.add = add_or_die  # type: ignore[method-assign]
