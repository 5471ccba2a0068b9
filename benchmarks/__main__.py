"""Measures one part of the toolkit: `python -m benchmarks data`. Each file of
recipes/benchmarks is one benchmark.

A benchmark compares alternatives within one run, alternating, so that a busy machine slows both.
`--out FILE` keeps the figures as JSON with device, versions and date, as in benchmarks/."""

import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import tyro

from bosch.plugins import describe_plugin, list_plugins, load_plugin
from bosch.run import progress
from bosch.run.errors import exit_on_user_error
from bosch.run.manifest import provenance, write_atomically

PACKAGE = "benchmarks"


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(describe_benchmarks())
        return
    exit_on_user_error(lambda: run_benchmark(name, arguments), debug="--debug" in arguments)


def describe_benchmarks() -> str:
    lines = [f"  {name:15} {describe_plugin(PACKAGE, name)}" for name in list_plugins(PACKAGE)]
    return "\n".join(["usage: benchmark.py NAME [options], or NAME --help; NAME is one of", *lines])


def run_benchmark(name: str, arguments: list[str]) -> None:
    benchmark = load_plugin(PACKAGE, name)
    options = tyro.cli(
        benchmark.Options,
        args=arguments,
        prog=f"benchmark.py {name}",
        description=benchmark.__doc__,
    )
    progress.set_up()
    rows = benchmark.measure(options)
    shows_table = getattr(benchmark, "SHOWS_TABLE", False)
    for row in rows:
        if not shows_table or "at_least" in row or "at_most" in row:
            print(describe_row(row))
    if options.out:
        write_results(options.out, name, rows)


def describe_row(row: dict[str, Any]) -> str:
    """`row` has a name, a value, a unit, and maybe a target that it should reach or stay under."""
    target = ""
    if "at_least" in row:
        verdict = "met" if row["value"] >= row["at_least"] else "MISSED"
        target = f"   (at least {row['at_least']:g}: {verdict})"
    if "at_most" in row:
        verdict = "met" if row["value"] <= row["at_most"] else "MISSED"
        target = f"   (at most {row['at_most']:g}: {verdict})"
    return f"{row['name']:58} {row['value']:14,.4g} {row['unit']}{target}"


def write_results(path: Path, name: str, rows: list[dict[str, Any]]) -> None:
    content = {
        "benchmark": name,
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        **provenance(),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def describe_machine() -> dict[str, Any]:
    import os

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"device": device, "cores": os.cpu_count(), "system": platform.system()}


if __name__ == "__main__":
    main()
