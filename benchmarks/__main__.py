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
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._options import Row
from bosch.command_line import choose_word, peek, read_options
from bosch.plugins import describe_plugin, list_plugins, load_plugin
from bosch.run import progress
from bosch.run.errors import run_main
from bosch.run.manifest import provenance, write_atomically

PACKAGE = "benchmarks"
COMMAND = "python -m benchmarks"


def main(arguments: Sequence[str]) -> None:
    about = {name: describe_plugin(PACKAGE, name) for name in list_plugins(PACKAGE)}
    run_benchmark(*choose_word(COMMAND, about, arguments))


def run_benchmark(name: str, arguments: Sequence[str]) -> None:
    """Run a benchmark and print the rows that have a target. The benchmark prints its own tables.
    The file is written as rows come, so that a run that is stopped keeps its results."""
    benchmark = load_plugin(PACKAGE, name)
    presets = getattr(benchmark, "PRESETS", {})
    options, _ = read_options(
        benchmark.Options,
        arguments,
        default=presets.get(peek(arguments, "preset")["preset"]),
        prog=f"{COMMAND} {name}",
        description=benchmark.__doc__,
    )
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
            if "at_least" in row:
                print(describe_row(row))


def write_rows(path: Path | None, facts: dict[str, object], rows: list[Row]) -> None:
    if path is not None and rows:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(facts | {"rows": rows}, indent=1) + "\n")


def describe_row(row: Row) -> str:
    verdict = "met" if row["value"] >= row["at_least"] else "MISSED"
    target = f"at least {row['at_least']:g}: {verdict}"
    return f"{row['name']:58} {row['value']:14,.4g} {row['unit']}   ({target})"


def describe_machine() -> dict[str, object]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"device": device, "cores": os.cpu_count(), "system": platform.system()}


if __name__ == "__main__":
    run_main(main)
