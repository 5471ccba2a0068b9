"""Files of finished runs, a line of JSON each (sweep.py --rows): all that reports read of a run,
the scores of single examples too, no weights and no texts. Reports read them like run folders.
"""

import gzip
from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bosch.config import fill_in
from bosch.eval.report.measures import condition
from bosch.eval.report.runs import Place, RunResults, read_run, tell_apart
from bosch.eval.report.statistics import Cell
from bosch.eval.rows import read_rows, write_line
from bosch.masks.mask import GroupMask, MaskFile
from bosch.model import ModelInfo
from bosch.run.errors import UserError
from bosch.run.manifest import write_atomically

KEPT_AS_IS = ("name", "commit", "config", "mask_cost", "stage_seconds")
KEPT_METRICS = ("step", "tokens", "loss", "validation_loss")  # of the training


def read_runs(given: Sequence[Path | RunResults]) -> list[RunResults]:
    """Runs by folders and archives, each under a name of its own."""
    runs: dict[Hashable, RunResults] = {}
    for one in given:
        if isinstance(one, Path):
            found = read_archive(one) if is_archive(one) else [read_run(one.resolve())]
        else:
            found = [one]
        runs |= {_identity(run): run for run in found}  # one that is given twice is one run
    names = [run.name for run in runs.values()]
    named: dict[str, RunResults] = {}
    for run in runs.values():
        unique = names.count(run.name) == 1
        name = run.name if unique else f"{run.path.parent.name}/{run.name}"
        while name in named:
            name += "'"
        named[name] = replace(run, name=name)
    return tell_apart(list(named.values()))


def is_archive(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz")) and path.is_file()


def append_run(archive: Path, run: RunResults) -> None:
    """Add a run as the last line; a kill leaves the old file."""
    told: dict[str, Any] = {name: getattr(run, name) for name in KEPT_AS_IS}
    told["mask"] = run.mask and asdict(run.mask)
    told["rows"] = [*run.rows, *run.variants]
    told["samples"] = [
        [*place, *cell, [scores.get(index) for index in range(max(scores) + 1)]]
        for place, cells in run.samples.items()
        for cell, scores in cells.items()
    ]
    told["training"] = [
        {name: row[name] for name in KEPT_METRICS if name in row} for row in run.training
    ]
    line = write_line(told).encode()
    known = archive.read_bytes() if archive.is_file() else b""
    archive.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(archive, known + (gzip.compress(line) if archive.suffix == ".gz" else line))


def read_archive(archive: Path) -> list[RunResults]:
    """Of lines on one run, name and settings the same, the last."""
    runs = {}
    for number, told in enumerate(read_rows(archive), 1):
        try:
            run = _parse_run(archive, told)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{archive}, line {number} is no run as sweep.py --rows keeps them ({error!r})."
            ) from error
        runs[_identity(run)] = run
    return list(runs.values())


def _identity(run: RunResults) -> Hashable:
    return run.path, str(run.config), run.mask and run.mask.model


def _parse_run(archive: Path, told: dict[str, Any]) -> RunResults:
    mask = told["mask"]
    if mask is not None:
        groups, model = GroupMask.from_rows(*mask["mask"].values()), ModelInfo(**mask["model"])
        mask = MaskFile(**mask | {"mask": groups, "model": model})
    samples: dict[Place, dict[Cell, dict[int, float]]] = {}
    for step, suite, under, task, length, scores in told["samples"]:
        known = {index: score for index, score in enumerate(scores) if score is not None}
        samples.setdefault((step, suite, under), {})[task, length] = known
    return RunResults(
        path=archive / told["name"],
        mask=mask,
        rows=[row for row in told["rows"] if not condition(row)],
        variants=[row for row in told["rows"] if condition(row)],
        samples=samples,
        training=told["training"],
        **{name: told[name] for name in KEPT_AS_IS} | {"config": fill_in(told["config"])},
    )
