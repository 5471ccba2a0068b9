"""What all benchmarks share: their options, time, and peak memory.

Other work on the machine slows whatever runs at that moment. So each round runs every side once. A
time is the median over rounds, and a speed-up is the median of the rounds' speed-ups. With one CPU
thread we measure its CPU time, which other processes hardly affect; otherwise wall-clock time.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bosch.run.errors import UserError

Row = dict[str, Any]  # one result: name, value, unit, and whatever its benchmark adds
PROCESS = Path("/proc/self")


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    out: Path | None = None  # JSON file for the figures


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(BenchmarkOptions):
    device: str | None = None  # cpu or cuda; None: the GPU if there is one
    threads: int = 1  # CPU threads that torch uses

    def start(self) -> torch.device:
        """Set torch's number of threads and return the device to measure on."""
        torch.set_num_threads(self.threads)
        if self.device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kind = self.device.partition(":")[0]
        if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
            raise UserError(
                f"--device {self.device}: this machine has no such device. Leave the option out, "
                "or use cpu."
            )
        return torch.device(self.device)


def time_in_turns(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    least_seconds: float = 0.02,
) -> dict[str, list[float]]:
    """Seconds per call of each side in each round. The first calls are not counted. A side faster
    than `least_seconds` is called several times per round.
    """

    def seconds_of(side: Callable[[], object], calls: int = 1) -> float:
        begin = now(device)
        for _ in range(calls):
            side()
        return (now(device) - begin) / calls

    calls = {}
    for name, side in sides.items():
        seconds_of(side)  # compiles and fills caches
        calls[name] = max(1, math.ceil(least_seconds / max(seconds_of(side), 1e-9)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(seconds_of(side, calls[name]))
    return seconds


def now(device: torch.device) -> float:
    """CPU or wall-clock time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    counts_cpu_time = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if counts_cpu_time else time.perf_counter()


def speedup(slow: Sequence[float], fast: Sequence[float]) -> float:
    return median(a / b for a, b in zip(slow, fast, strict=True))


class PeakMemory:
    """The peak since this was made: of torch's allocations on a GPU, else of the whole process,
    which only Linux knows.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_known = device, True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            (PROCESS / "clear_refs").write_text("5")  # resets VmHWM
        except OSError:
            self._is_known = False

    def read(self) -> int | None:
        if not self._is_known:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = re.search(r"VmHWM:\s+(\d+) kB", (PROCESS / "status").read_text())
        return int(peak[1]) * 1024 if peak else None


def describe_device(device: torch.device) -> str:
    """For the title of a table."""
    return device.type if device.type != "cpu" else f"cpu, threads: {torch.get_num_threads()}"


def short(tokens: int) -> str:
    """A length in the short form of papers: 64k, 1M. 1000 stays 1000."""
    for size, unit in ((2**20, "M"), (2**10, "k")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)
