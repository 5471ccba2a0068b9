"""Runs one benchmark: `python -m benchmarks latency`. Each file of benchmarks/ is a benchmark, with
`Options`, `measure(options)`, which yields result rows, and TITLE and COLUMNS, the table of them.

A benchmark alternates between the alternatives that it compares, so that a busy machine slows all
of them. `--out FILE` saves the figures as JSON with device, versions and date, as in
benchmarks/results/.
"""

import datetime
import json
import os
import platform
from collections.abc import Sequence

import torch

from benchmarks._measure import Row, run_part
from bosch.command_line import choose_word, parse, peek
from bosch.plugins import describe_plugin, list_plugins, load_plugin
from bosch.run import progress
from bosch.run.checkout import provenance
from bosch.run.errors import run_main
from bosch.run.files import write_atomically
from bosch.run.fingerprint import plain

PACKAGE = "benchmarks"
COMMAND = "python -m benchmarks"


def main(arguments: Sequence[str]) -> None:
    about = {name: describe_plugin(PACKAGE, name) for name in list_plugins(PACKAGE)}
    run_benchmark(*choose_word(COMMAND, about, arguments))


def run_benchmark(name: str, arguments: Sequence[str]) -> None:
    """Run a benchmark and print its table, and the rows that have a target. The file is written as
    rows come, so that a run that is stopped keeps its results."""
    benchmark = load_plugin(PACKAGE, name)
    preset = getattr(benchmark, "PRESETS", {}).get(peek(arguments, "preset")["preset"])
    usual = vars(preset) if preset else {}
    # A preset is another set of defaults, so that single options still come on top of it.
    options = parse(benchmark.Options, arguments, usual, f"{COMMAND} {name}")
    progress.set_up()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    machine = {"device": device, "cores": os.cpu_count(), "system": platform.system()}
    facts: dict[str, object] = {"benchmark": name, "date": datetime.date.today().isoformat()}
    chosen = {name: plain(value) for name, value in vars(options).items() if name != "out"}
    facts |= {"machine": machine, "options": chosen, **provenance()}
    rows: list[Row] = []
    try:
        for row in run_part(benchmark, options):
            rows.append(row)
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(options.out, json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    finally:
        for row in rows:
            if "at_least" in row:
                verdict = "met" if row["value"] >= row["at_least"] else "MISSED"
                found = f"{row['name']:58} {row['value']:14,.4g} {row['unit']}"
                print(f"{found}   (at least {row['at_least']:g}: {verdict})")


if __name__ == "__main__":
    run_main(main)
