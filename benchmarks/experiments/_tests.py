"""Tests as points of measurement: pytest in a process of its own, whose row says what failed."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import torch

from benchmarks._measure import Row
from benchmarks.experiments._points import Point, Points
from bosch.run.checkout import ROOT


def points_of_tests(
    on_gpu: Mapping[str, Sequence[str]], on_cpu: Mapping[str, Sequence[str]], device: torch.device
) -> Points:
    for name, arguments in (on_gpu if device.type == "cuda" else on_cpu).items():
        yield Point(name, partial(run_tests, name, arguments, device))


def run_tests(name: str, arguments: Sequence[str], device: torch.device) -> list[Row]:
    # In a process of its own, as a failed kernel can end it; the report is a file, so that what
    # pytest prints stays readable.
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", f"--junitxml={report}", *arguments]
        # A package that was installed without compiling warns when it is first imported.
        command += ["-W", "ignore::SyntaxWarning"]
        command += ["-m", "gpu" if device.type == "cuda" else "not gpu and not slow"]
        done = subprocess.run(command, cwd=ROOT)
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {done.returncode} before its report")
        outcomes: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
        for case in ElementTree.parse(report).iter("testcase"):
            found = next((each.tag for each in case), "passed")  # failure, error or skipped
            outcomes[found if found in outcomes else "failed"].append(case.attrib["name"])
    passed, skipped, wrong = map(len, outcomes.values())
    row: Row = {"name": name, "value": passed / (passed + wrong) if passed + wrong else None}
    row |= {"unit": "of the tests passed", "passed": passed, "skipped": skipped}
    return [row | {"wrong": outcomes["failed"]}]


def conclude_tests(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row['name']}: {row['passed']} tests passed, {row['skipped']} skipped"
        + (f", wrong: {', '.join(row['wrong'])}" if row["wrong"] else "")
        for row in rows
    ]
