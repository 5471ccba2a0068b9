"""Runs one benchmark: `python -m benchmarks latency`. Each file of benchmarks/ is a benchmark, with
`Options` and `measure(options)`, which returns or yields result rows or lists of them.

A benchmark alternates between the alternatives that it compares, so that a busy machine slows all
of them. `--out FILE` saves the figures as JSON with device, versions and date, as in
benchmarks/results/.
"""

import datetime
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._options import Row
from bosch.command_line import read_options
from bosch.plugins import describe_plugin, list_plugins, load_plugin
from bosch.run import progress
from bosch.run.errors import exit_on_user_error
from bosch.run.manifest import provenance, write_atomically

PACKAGE = "benchmarks"


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: python -m benchmarks NAME [options]\n\nbenchmarks:")
        for name in list_plugins(PACKAGE):
            print(f"  {name:16} {describe_plugin(PACKAGE, name)}")
        print("\npython -m benchmarks NAME --help shows the options of one.")
        return
    exit_on_user_error(lambda: run_benchmark(name, arguments), debug="--debug" in arguments)


def run_benchmark(name: str, arguments: list[str]) -> None:
    """Run a benchmark and print the rows that have a target. The benchmark prints its own tables.
    The file is written as rows come, so that a run that is stopped keeps its results."""
    benchmark = load_plugin(PACKAGE, name)
    about: dict[str, Any] = {
        "prog": f"python -m benchmarks {name}",
        "description": benchmark.__doc__,
    }
    options, _ = read_options(benchmark.Options, arguments, **about)
    if hasattr(benchmark, "PRESETS"):  # parse again, with the preset's values as defaults
        preset = benchmark.PRESETS[options.preset]
        options, _ = read_options(benchmark.Options, arguments, default=preset, **about)
    progress.set_up()
    facts: dict[str, object] = {"benchmark": name, "date": datetime.date.today().isoformat()}
    facts |= {"machine": describe_machine(), **provenance()}
    rows: list[Row] = []
    written = -math.inf
    try:
        for made in benchmark.measure(options):
            rows += made if isinstance(made, list) else [made]
            # Not thousands of rows thousands of times.
            if time.monotonic() > written + min(5.0, len(rows) / 100):
                write_rows(options.out, facts, rows)
                written = time.monotonic()
    finally:
        write_rows(options.out, facts, rows)
        for row in rows:
            if "at_least" in row or "at_most" in row:
                print(describe_row(row))


def write_rows(path: Path | None, facts: dict[str, object], rows: list[Row]) -> None:
    if path is not None and rows:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(facts | {"rows": rows}, indent=1) + "\n")


def describe_row(row: Row) -> str:
    """`row` has a name, a value, a unit, and a target: `at_least` or `at_most`."""
    if "at_least" in row:
        target, is_met = f"at least {row['at_least']:g}", row["value"] >= row["at_least"]
    else:
        target, is_met = f"at most {row['at_most']:g}", row["value"] <= row["at_most"]
    verdict = "met" if is_met else "MISSED"
    return f"{row['name']:58} {row['value']:14,.4g} {row['unit']}   ({target}: {verdict})"


def describe_machine() -> dict[str, object]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"device": device, "cores": os.cpu_count(), "system": platform.system()}


if __name__ == "__main__":
    main()
