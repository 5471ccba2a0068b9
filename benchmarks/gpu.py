"""Run all benchmarks that have GPU settings, one after the other, and write one file.

A benchmark takes part by defining GPU_OPTIONS. `make gpu` calls this after the GPU tests. The file,
benchmarks/results/<device>-<date>.json, is written after each part; a part that fails is named in
it, and the others run. Without a GPU this does nothing and is not an error.
"""

import datetime
import gc
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

from benchmarks._measure import BenchmarkOptions, Row, run_part
from bosch.plugins import list_plugins, load_plugin
from bosch.run.errors import UserError
from bosch.run.progress import describe_seconds, say

PACKAGE = "benchmarks"


def default_file() -> Path:
    """benchmarks/results/nvidia-h200-2026-01-31.json"""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return Path(__file__).parent / "results" / f"{name}-{datetime.date.today().isoformat()}.json"


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    out: Path = field(default_factory=default_file)  # JSON file for the figures
    only: tuple[str, ...] = ()  # benchmarks to run; empty: all that have GPU settings


def measure(options: Options) -> Iterator[Row]:
    if not torch.cuda.is_available():
        say("gpu: no CUDA device, so nothing is measured or written")
        raise SystemExit(0)
    yield from measure_parts(gpu_parts(options.only))


def gpu_parts(only: tuple[str, ...] = ()) -> dict[str, ModuleType]:
    parts = {name: load_plugin(PACKAGE, name) for name in only or list_plugins(PACKAGE)}
    able = {name: part for name, part in parts.items() if getattr(part, "GPU_OPTIONS", None)}
    if lacking := sorted(parts.keys() - able.keys() if only else ()):
        raise UserError(
            f"--only {lacking[0]}: this benchmark has no GPU settings; run it by its name."
        )
    return able


def measure_parts(parts: dict[str, ModuleType]) -> Iterator[Row]:
    """The rows of all parts; in place of what a part lacks, a row with `failed`. Exit status 1 if
    there is one."""
    failed = []
    for name, benchmark in parts.items():
        begin = time.monotonic()
        try:
            for row in run_part(benchmark, benchmark.GPU_OPTIONS):
                yield {"benchmark": name, **row}
            say(f"gpu: {name} took {describe_seconds(time.monotonic() - begin)}")
        except Exception as error:  # whatever it is, the next part may run
            traceback.print_exc()
            failed.append(f"{name} ({type(error).__name__})")
            yield {"benchmark": name, "failed": traceback.format_exc(limit=-5)}
        gc.collect()  # the failed part's tensors
        torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"gpu: failed: {', '.join(failed)}; the rest is measured")
