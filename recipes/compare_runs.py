"""Compares runs: recovery curves, how far and how fast each run recovers, masks and their cost.

    python recipes/compare_runs.py runs/*
    python recipes/compare_runs.py runs/*-r0.75 --baseline fisher
    python recipes/compare_runs.py runs/study.jsonl            # runs stored by sweep.py --rows
    python recipes/compare_runs.py runs/* --rebuild-tb

Writes report.html (one file, for any browser), table.md, pictures and rows into --out. Folders and
files that are not runs, such as runs/shared or a log, are skipped. The report names missing parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bosch.command_line import parse
from bosch.config import POSITIONAL
from bosch.eval.report.compare import Comparison, compare
from bosch.eval.report.page import warnings, write_report
from bosch.eval.report.runs import RunResults, is_archive, is_run
from bosch.eval.report.tables import align, baseline_table, short_table
from bosch.run.errors import MissingFileError, UserError, run_main
from bosch.run.folder import RunFolder
from bosch.run.lock import FolderInUseError
from bosch.run.progress import say, set_up
from bosch.run.stage import Artifact, Stage

MOST_WARNINGS = 12  # on the terminal; the report lists all


@dataclass(frozen=True)
class Options:
    """Compare runs, and write a report."""

    # run folders, or files of finished runs (sweep.py --rows); none: all folders in runs/
    runs: Annotated[tuple[Path, ...], POSITIONAL] = ()
    out: Path = Path("comparison")  # folder for the report
    baseline: str | None = None  # method, run or NAME=VALUE of a setting to compare with
    rebuild_tb: bool = False  # only rebuild the TensorBoard files of the runs


def main(arguments: Sequence[str]) -> None:
    options = parse(Options, arguments)
    set_up()
    given = options.runs or sorted(Path("runs").glob("*/"))
    for path in given:
        if not path.exists():
            raise MissingFileError(f"{path}: no such folder or file; name run folders, as runs/*")
    runs = [path for path in given if is_run(path) or is_archive(path)]
    if not runs:
        listed = ", ".join(map(str, given)) or "runs/"
        raise UserError(f"No runs to compare in {listed}; name run folders, such as runs/NAME.")
    if not options.rebuild_tb:
        compare_and_show(runs, options.out, options.baseline)
        return
    from bosch.eval.report.tensorboard import rebuild_tensorboard

    for folder in filter(Path.is_dir, runs):  # an archive has no curves
        try:
            with RunFolder(folder, say=say):  # a run in progress writes its own
                rebuild_tensorboard(folder)
        except FolderInUseError as error:
            say(f"skipped {folder / 'tb'}: {error}")
        else:
            say(f"rebuilt {folder / 'tb'}")


def compare_and_show(runs: Sequence[Path | RunResults], out: Path, baseline: str | None) -> None:
    comparison = compare(runs, baseline)
    written = write_report(comparison, out)
    lines = align(short_table(comparison))
    if (differences := baseline_table(comparison)).rows:
        lines += [f"{differences.title}:", *align(differences)]
    say(*lines)
    warn(comparison)
    say(f"report in {written[0]}")


def warn(comparison: Comparison) -> None:
    lines = warnings(comparison)
    say(*(f"warning: {line}" for line in lines[:MOST_WARNINGS]))
    if len(lines) > MOST_WARNINGS:
        say(f"{len(lines) - MOST_WARNINGS} more warnings in the report")


def build(run_path: Path, made_from: Sequence[Stage]) -> Stage:
    """The stage `report` of recover.py, for one run."""

    def run(out: Path, **_: Artifact) -> None:
        write_report(compare([run_path]), out)

    return Stage("report", run=run, inputs={stage.name: stage for stage in made_from}, derived=True)


if __name__ == "__main__":
    run_main(main)
