"""Compares runs: recovery curves, how far and how fast each run recovers, masks and their cost.

    python recipes/compare_runs.py runs/*
    python recipes/compare_runs.py runs/*-r0.75 --baseline fisher
    python recipes/compare_runs.py runs/study.jsonl            # runs stored by sweep.py --rows

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
from bosch.eval.report.tables import align, baseline_table, dense_table, short_table
from bosch.masks.mask import write_mask
from bosch.run.errors import MissingFileError, UserError, run_main
from bosch.run.progress import say, set_up

MOST_WARNINGS = 12  # on the terminal; the report lists all


@dataclass(frozen=True)
class Options:
    # run folders, or files of finished runs (`bosch sweep` --rows); none: all folders in runs/
    runs: Annotated[tuple[Path, ...], POSITIONAL] = ()
    out: Path = Path("comparison")  # folder for the report
    baseline: str | None = None  # method, run or NAME=VALUE of a setting to compare with
    # Also write each run's mask, as NAME.json, into this folder, for `--method from_file`.
    masks: Annotated[Path | None, "DIR"] = None


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
    comparison = compare_and_show(runs, options.out, options.baseline)
    if options.masks is not None:
        write_masks(comparison.runs, options.masks)


def compare_and_show(
    runs: Sequence[Path | RunResults], out: Path, baseline: str | None
) -> Comparison:
    comparison = compare(runs, baseline)
    written = write_report(comparison, out)
    lines = align(short_table(comparison))
    for table in (dense_table(comparison), baseline_table(comparison)):
        if table.rows:
            lines += [f"{table.title}:", *align(table)]
    say(*lines)
    warn(comparison)
    say(f"report in {written[0]}")
    return comparison


def write_masks(runs: Sequence[RunResults], folder: Path) -> None:
    """Without the constants of static sinks, which a file of runs does not have: `from_file`
    measures them anew."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {run.name: run.mask for run in runs if run.mask is not None}
    for name, record in found.items():
        write_mask(folder / f"{name}.json", record)
    say(f"masks in {folder}: {len(found)}")


def warn(comparison: Comparison) -> None:
    lines = warnings(comparison)
    say(*(f"warning: {line}" for line in lines[:MOST_WARNINGS]))
    if len(lines) > MOST_WARNINGS:
        say(f"{len(lines) - MOST_WARNINGS} more warnings in the report")


if __name__ == "__main__":
    run_main(main)
