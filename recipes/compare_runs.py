"""Compares runs: curves, how far and how fast each recovers, masks and what they cost.

    python recipes/compare_runs.py runs/*
    python recipes/compare_runs.py runs/*-r0.75 --baseline runs/tiny-qwen3-fisher-r0.75
    python recipes/compare_runs.py runs/* --rebuild-tb

Writes report.html (one file, for any browser), table.md, pictures and rows into --out. What is no
run, such as runs/shared or a log, is passed over; parts that a run lacks are named in the report.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from bosch.run import progress
from bosch.run.errors import exit_on_user_error
from bosch.run.folder import RunFolder
from bosch.run.lock import FolderInUseError
from bosch.run.progress import say
from bosch.run.stage import Artifact, Stage
from eval.report.compare import Comparison, compare
from eval.report.page import write_comparison, write_report
from eval.report.runs import is_run
from eval.report.tables import align, short_table, warnings

MOST_WARNINGS = 12  # on the terminal; the report holds all


@dataclass(frozen=True)
class Options:
    """Compare runs, and write a report."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()  # run folders; none: all in runs/
    out: Path = Path("comparison")  # folder of the report
    baseline: str | None = None  # a run: name or folder; the others are measured against it
    rebuild_tb: tyro.conf.FlagCreatePairsOff[bool] = False
    """write the runs' TensorBoard files anew, and do nothing else"""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False  # show the traceback of an error


def main(arguments: Sequence[str]) -> None:
    options = tyro.cli(Options, args=arguments, prog="compare_runs.py", description=__doc__)
    progress.set_up()
    folders = find_runs(options.runs or sorted(Path("runs").glob("*/")))
    if options.rebuild_tb:
        rebuild_tensorboard(folders)
        return
    comparison = compare(folders, options.baseline)
    written = write_comparison(comparison, options.out)
    for line in align(short_table(comparison)):
        say(line)
    warn(comparison)
    say(f"report {written[0]}")


def build(run_path: Path, made_from: Sequence[Stage]) -> Stage:
    """The stage `report` of recover.py, on one run."""

    def run(out: Path, **_: Artifact) -> None:
        write_report([run_path], out)

    inputs = {stage.name: stage for stage in made_from}
    return Stage("report", run=run, inputs=inputs, derived=True)


def find_runs(given: Sequence[Path]) -> list[Path]:
    """Those of the folders that are runs. ValueError if none is."""
    for path in given:
        if not path.exists():
            raise FileNotFoundError(f"{path}: there is no such folder; name run folders: runs/*")
    found = [path for path in given if is_run(path)]
    if not found:
        told = ", ".join(map(str, given)) or "runs/ holds none"
        raise ValueError(f"No run folders to compare: {told}. Name some: runs/*")
    return found


def rebuild_tensorboard(folders: Sequence[Path]) -> None:
    from bosch.run.tensorboard import rebuild_tensorboard

    for folder in folders:
        try:
            with RunFolder(folder, say=say):  # a run that trains is writing them
                rebuild_tensorboard(folder)
        except FolderInUseError as error:
            say(f"{folder / 'tb'} left as it is: {error}")
        else:
            say(f"{folder / 'tb'} written anew")


def warn(comparison: Comparison) -> None:
    """What a reader must know before the numbers."""
    told = warnings(comparison)
    for line in told[:MOST_WARNINGS]:
        say(f"warning: {line}")
    if len(told) > MOST_WARNINGS:
        say(f"{len(told) - MOST_WARNINGS} more warnings in the report")


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)
