"""Searches on a shipped model in this process: calibration sets, and one method's mask with what it
took.
"""

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from transformers import PreTrainedModel

from benchmarks import _timing
from bosch.calibration import Calibration, read_calibration
from bosch.config import Config
from bosch.method import Context, Selection
from bosch.methods import _choose
from bosch.methods._guided import rank_statically
from bosch.model import read_model_info
from bosch.run.folder import RunFolder
from recipes import calibrate, search_mask
from recipes.materialize_model import fetch_model


@dataclass(frozen=True)
class Setup:
    """A model and a calibration set, loaded once for many searches."""

    config: Config
    folder: Path  # of the model
    model: PreTrainedModel
    calibration: Calibration
    rankings: Path  # static rankings on this set, once a search has wanted them


@dataclass(frozen=True)
class Searched:
    """One search."""

    selection: Selection
    seconds: float  # CPU time where one thread did all the work; static rankings are not in it

    @property
    def trace(self) -> dict[str, Any]:
        return dict(self.selection.score_trace or {})

    @property
    def evaluations(self) -> int:
        return int(self.trace["evaluations"])

    @property
    def layer_forwards(self) -> float:
        assert self.selection.cost is not None
        return self.selection.cost["layer_forwards"]


def set_up(config: Config, runs: Path, model: PreTrainedModel | None = None) -> Setup:
    """The calibration set is made where `runs` does not have it yet."""
    folder, stage = fetch_model(config.model), calibrate.build(config)
    own = runs / f"set-{stage.fingerprint[:12]}"
    with RunFolder(own, say=lambda line: None) as run:
        made = run.complete(stage)
    loaded = search_mask.load_model(folder) if model is None else model
    weights = read_model_info(folder).weight_hash or folder.name
    rankings = own / f"rankings-{weights[:12]}-{config.window}"
    return Setup(config, folder, loaded, read_calibration(made.folder), rankings)


def search(
    setup: Setup,
    method: str,
    ratio: float,
    seed: int = 0,
    folder: Path | None = None,
    **settings: Any,
) -> Searched:
    """A method's mask. Without a stage's folder it is searched from nothing: no memo is read."""
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return search(setup, method, ratio, seed, Path(temporary), **settings)
    config, device = setup.config, setup.model.device
    chosen = search_mask.default_settings(method, config.mask)
    context = Context(
        model_info=read_model_info(setup.folder),
        load_model=lambda: setup.model,
        load_calibration=lambda: setup.calibration,
        window_tokens=config.window,
        ratio=ratio,
        seed=seed,
        settings=dataclasses.replace(chosen, **settings),
        folder=folder,
        load_tokenizer=partial(search_mask.load_tokenizer, setup.folder),
    )
    for name in getattr(context.settings, "rankings", ()):
        kept = setup.rankings / name
        if not kept.is_dir():
            rank_statically(dataclasses.replace(context, folder=setup.rankings.parent), [name])
            shutil.move(setup.rankings.parent / "rankings" / name, kept)
        shutil.copytree(kept, folder / "rankings" / name, dirs_exist_ok=True)
    began = _timing.now(device)
    selection = _choose.make_mask(method, context)
    return Searched(selection, _timing.now(device) - began)


# ---------------------------------------------------------------------------- rows kept on the disk


def add_row(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """A last line that a kill tore is dropped, from the file too."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return [json.loads(line) for line in content[:whole].splitlines()]


def grouped(
    rows: Sequence[dict[str, Any]], *names: str
) -> list[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    """Rows by the values of some fields, in the order of their first appearance."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.items())


def average(rows: Sequence[dict[str, Any]], name: str) -> float:
    return mean(row[name] for row in rows)


def stderr(values: Iterable[float]) -> float | None:
    """None for a single one."""
    numbers = list(values)
    return stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None


def show_mean(values: Iterable[float], form: str = ".1f") -> str:
    """With its standard error, where there is one."""
    numbers = list(values)
    error = stderr(numbers)
    return f"{mean(numbers):{form}}" + ("" if error is None else f" ± {error:.1f}")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """In Markdown: the first column on the left, the others on the right, None an empty cell."""
    lines = [f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
    for row in rows:
        lines.append(f"| {' | '.join('' if cell is None else str(cell) for cell in row)} |")
    return [*lines, ""]
