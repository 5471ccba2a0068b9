"""All benchmarks that say what they measure on a GPU, one after the other, into one file.

A benchmark takes part by defining `gpu_options()`, a tuple of its options. `make gpu` calls this
after the gpu tests. The file, benchmarks/results/<device>-<date>.json, grows with each part. On a
machine without a GPU nothing is measured or written, and that is no error.
"""

import datetime
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks._options import BenchmarkOptions
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
    out: Path = field(default_factory=default_file)
    only: tuple[str, ...] = ()
    """Names of benchmarks. None given: all that have a part for a GPU."""


def measure(options: Options) -> Iterator[dict[str, Any]]:
    if not torch.cuda.is_available():
        say("gpu: there is no CUDA device here. Nothing is measured, nothing is written.")
        raise SystemExit(0)
    for name, benchmark in gpu_parts(options.only).items():
        yield from measure_part(name, benchmark)


def gpu_parts(only: tuple[str, ...] = ()) -> dict[str, ModuleType]:
    """The benchmarks that take part."""
    names = only or tuple(name for name in list_plugins(PACKAGE) if name != Path(__file__).stem)
    modules = {name: load_plugin(PACKAGE, name) for name in names}
    parts = {name: module for name, module in modules.items() if hasattr(module, "gpu_options")}
    if left := set(only) - set(parts):
        raise UserError(f"--only {min(left)}: nothing of this benchmark is for a GPU.")
    return parts


def measure_part(name: str, benchmark: ModuleType, **changes: Any) -> Iterator[dict[str, Any]]:
    """Its rows, with its name in each. `changes` make it small."""
    begin = time.monotonic()
    for options in benchmark.gpu_options():
        for row in benchmark.measure(replace(options, **changes)):
            yield {"benchmark": name, **row}
    say(f"gpu: {name} took {describe_seconds(time.monotonic() - begin)}")
