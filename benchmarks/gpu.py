"""Ten minutes that decide: run all parts below in their order, and write one file.

A part is a file of tests, or a benchmark with GPU_OPTIONS and CPU_OPTIONS: one of its Options, or
several. The file is written after each row. A part that fails is named in it, and the others run.
The last row says what failed, and what was slower than computed. `--device cpu` rehearses all of it
with small shapes; otherwise, without a GPU, this does nothing and is not an error.
"""

import datetime
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import torch

from benchmarks._measure import BenchmarkOptions, Row, run_part
from bosch.eval.elsewhere import usual_python, with_this_code
from bosch.plugins import load_plugin
from bosch.run.checkout import ROOT
from bosch.run.errors import UserError
from bosch.run.progress import describe_seconds, say

PACKAGE = "benchmarks"
# Kernels and training first: if they are wrong, the rest is of no use.
PARTS = tuple("kernels switches train latency stages serving attention".split())
STAGES = "tests/gpu/test_stages_on_devices.py"  # evaluation, a kill and a resume
TESTS = {  # on a GPU, and on a CPU
    "kernels": (
        ["tests/gpu/test_backends_gpu.py"],
        ["tests/contracts/test_backends.py", "-k", "outputs_and_gradients"],
    ),
    "stages": ([STAGES], [STAGES, "-k", "evaluation or killed"]),
}
SLOW = 0.9  # of the computed figure


def default_file() -> Path:
    """benchmarks/results/nvidia-h200-2026-01-31.json"""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    first = Path(__file__).parent / "results" / f"{name}-{datetime.date.today().isoformat()}.json"
    # What is there is kept.
    others = (first.with_stem(f"{first.stem}-{n}") for n in itertools.count(2))
    return next(path for path in itertools.chain([first], others) if not path.exists())


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    device: Literal["cuda", "cpu"] = "cuda"  # cpu: a rehearsal with small shapes
    out: Path = field(default_factory=default_file)  # JSON file for the figures
    only: tuple[str, ...] = ()  # parts to run; empty: all


def measure(options: Options) -> Iterator[Row]:
    if options.device == "cpu" and torch.cuda.is_available():
        raise UserError("--device cpu: hide the GPUs; set CUDA_VISIBLE_DEVICES to nothing.")
    if options.device == "cuda" and not torch.cuda.is_available():
        say("gpu: no CUDA device, so nothing is measured or written; --device cpu rehearses it")
        raise SystemExit(0)
    if others := set(options.only).difference(PARTS):
        raise UserError(f"--only {min(others)}: the parts are {', '.join(PARTS)}.")
    yield from measure_parts(options.only or PARTS, options.device)


def measure_parts(parts: Sequence[str], device: str) -> Iterator[Row]:
    """The rows of all parts; in place of what a part lacks, a row with `failed`; and the verdict.
    Exit status 1 if a part failed."""
    failed, slow = [], []
    for name in parts:
        begin = time.monotonic()
        try:
            for row in rows_of(name, device):
                row.pop("at_least", None)  # for other shapes
                yield {"benchmark": name, **row}
                figure, computed = row.get(row.get("figure", "")), row.get("computed")
                if figure is not None and computed is not None and figure < SLOW * computed:
                    slow.append(f"{row['name']} ({figure:.3g}, computed {computed:.3g})")
        except Exception as error:  # whatever it is, the next part may run
            traceback.print_exc()
            failed.append(f"{name} ({type(error).__name__})")
            yield {"benchmark": name, "failed": traceback.format_exc(limit=-5)}
        say(f"gpu: {name} took {describe_seconds(time.monotonic() - begin)}")
        gc.collect()  # the failed part's tensors
        torch.cuda.empty_cache()
    slower = ", ".join(slow) or ("nothing" if device == "cuda" else "not asked on a CPU")
    verdict = f"failed: {', '.join(failed) or 'nothing'}; slower than computed: {slower}"
    yield {"benchmark": "gpu", "name": "verdict", "verdict": verdict}
    say(f"gpu: {verdict}")
    if failed:
        raise SystemExit(1)


def rows_of(part: str, device: str) -> Iterator[Row]:
    if part in TESTS:
        yield from rows_of_tests(TESTS[part][device == "cpu"], device)
    elif part == "serving" and find_spec("vllm") is None:
        yield from rows_from_serving(device)
    else:
        benchmark = load_plugin(PACKAGE, part)
        chosen = benchmark.CPU_OPTIONS if device == "cpu" else benchmark.GPU_OPTIONS
        for options in chosen if isinstance(chosen, tuple) else (chosen,):
            yield from run_part(benchmark, options)


def rows_of_tests(chosen: Sequence[str], device: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", f"--junitxml={report}", *chosen]
        command += ["-m", "not gpu" if device == "cpu" else "gpu"]
        done = subprocess.run(command, cwd=ROOT)
        # None of a process that aborted.
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            found = next((each.tag for each in case), "passed")  # failure, error or skipped
            row: Row = {"name": case.attrib["name"], "outcome": found}
            yield row | {"value": float(case.attrib["time"]), "unit": "s"}
    if done.returncode:
        raise RuntimeError(f"pytest ended with status {done.returncode}; see above")


def rows_from_serving(device: str) -> Iterator[Row]:
    """vLLM has an environment of its own."""
    python = Path(usual_python())
    if ".venv-serving" not in python.parts:
        yield {"name": "serving", "skipped": "no .venv-serving here; make serving makes it"}
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "serving.json"
        command = [str(python), "-m", "benchmarks", "gpu", "--only", "serving", "--device", device]
        done = subprocess.run([*command, "--out", str(out)], env=with_this_code(os.environ))
        if out.exists():  # also of one that failed
            rows = json.loads(out.read_text())["rows"]
            yield from (row for row in rows if row.get("name") != "verdict")
        done.check_returncode()
