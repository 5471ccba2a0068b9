"""Files of finished runs (sweep.py --rows), one JSON line a run: everything reports read of a run,
with the scores of single examples, without weights and texts. Reports read them like run folders.
"""

import gzip
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bosch.config import fill_in
from bosch.eval.report.runs import EvaluationKey, RunResults, distinguish_runs, read_run
from bosch.eval.report.scores import condition
from bosch.eval.report.statistics import Samples
from bosch.eval.rows import Row
from bosch.masks.mask import GroupMask, MaskFile
from bosch.model import ModelInfo
from bosch.run.errors import UserError
from bosch.run.files import parse_lines, path_inside, sealed_lines, write_atomically

COPIED_FIELDS = ("name", "commit", "config", "mask_cost", "stage_seconds")
TRAINING_FIELDS = (
    *("step", "tokens", "loss", "validation_loss", "dense_validation_loss"),
    *("flops", "data_seconds", "compute_seconds"),
)


def read_runs(given: Sequence[Path | RunResults]) -> list[RunResults]:
    """Runs from folders and archives, each with a unique name. A run given twice is read once."""
    runs: dict[Hashable, RunResults] = {}
    for one in given:
        if isinstance(one, RunResults):
            members = [one]
        else:
            members = read_archive(one) if is_archive(one) else [read_run(one.resolve())]
        runs |= {_identity(run): run for run in members}
    names = [run.name for run in runs.values()]
    named: dict[str, RunResults] = {}
    for run in runs.values():
        unique = names.count(run.name) == 1
        name = run.name if unique else f"{run.path.parent.name}/{run.name}"
        while name in named:
            name += "'"
        named[name] = replace(run, name=name)
    return distinguish_runs(list(named.values()))


def is_archive(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz")) and path.is_file()


def append_run(archive: Path, run: RunResults) -> None:
    """Add a run as the last line. The file is replaced at once: a kill leaves the old one."""
    record: Row = {name: getattr(run, name) for name in COPIED_FIELDS}
    record["mask"] = run.mask and asdict(run.mask)
    record["rows"] = [*run.rows, *run.variants]
    record["samples"] = [
        [*key, *cell, [scores.get(index) for index in range(max(scores) + 1)]]
        for key, cells in run.samples.items()
        for cell, scores in cells.items()
    ]
    record["training"] = [
        {name: row[name] for name in TRAINING_FIELDS if name in row} for row in run.training
    ]
    line = sealed_lines([record])
    before = archive.read_bytes() if archive.is_file() else b""
    if before and archive.suffix != ".gz":
        before = before.rstrip(b"\n") + b"\n"  # reading allows a last line without one
    archive.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(archive, before + (gzip.compress(line) if archive.suffix == ".gz" else line))


def read_archive(archive: Path) -> list[RunResults]:
    """Of several lines on one run (same name and settings), the last one."""
    runs = {}
    try:
        content = archive.read_bytes()
        content = gzip.decompress(content) if archive.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{archive} cannot be read ({error}); name another file.") from error
    for number, record in parse_lines(content.rstrip(b"\n") + b"\n"):  # a torn line counts
        try:
            if record is None:
                raise ValueError("its checksum differs")
            run = _parse_run(archive, record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{archive}, line {number} is not a run that sweep.py --rows wrote ({error!r}). "
                "Delete the line, or name another file."
            ) from error
        runs[_identity(run)] = run
    return list(runs.values())


def _identity(run: RunResults) -> Hashable:
    return run.path, str(run.config), run.method, run.mask and run.mask.model


def _parse_run(archive: Path, record: Row) -> RunResults:
    mask = record["mask"]
    if mask is not None:
        groups, model = GroupMask.from_rows(*mask["mask"].values()), ModelInfo(**mask["model"])
        mask = MaskFile(**mask | {"mask": groups, "model": model})
    samples: dict[EvaluationKey, dict[tuple[str, int], dict[int, float]]] = {}
    for step, suite, under, task, length, scores in record["samples"]:
        known = {index: score for index, score in enumerate(scores) if score is not None}
        samples.setdefault((step, suite, under), {})[task, length] = known
    copied: dict[str, Any] = {name: record[name] for name in COPIED_FIELDS}
    return RunResults(
        path=path_inside(archive, record["name"], archive, flat=True),
        mask=mask,
        rows=[row for row in record["rows"] if not condition(row)],
        variants=[row for row in record["rows"] if condition(row)],
        samples=dict[EvaluationKey, Samples](samples),
        training=record["training"],
        **copied | {"config": fill_in(record["config"])},
    )
