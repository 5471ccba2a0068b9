"""Times the sides of a comparison in turns in one process.

Other work on the machine slows whatever runs at that moment. So each round runs every side once. A
time is the median over rounds, and a speed-up is the median of the rounds' speed-ups. With one CPU
thread we measure its CPU time, which other processes hardly affect; otherwise wall-clock time.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch


def time_in_turns(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    least_seconds: float = 0.02,
) -> dict[str, list[float]]:
    """Seconds per call of each side in each round. The first calls are not counted. A side faster
    than `least_seconds` is called several times per round.
    """
    calls = {}
    for name, side in sides.items():
        seconds_of(side, device)  # compiles and fills caches
        calls[name] = max(1, math.ceil(least_seconds / max(seconds_of(side, device), 1e-9)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(seconds_of(side, device, calls[name]))
    return seconds


def seconds_of(side: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    begin = now(device)
    for _ in range(calls):
        side()
    return (now(device) - begin) / calls


def now(device: torch.device) -> float:
    """CPU or wall-clock time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.process_time() if counts_cpu_time(device) else time.perf_counter()


def counts_cpu_time(device: torch.device) -> bool:
    return device.type == "cpu" and torch.get_num_threads() == 1


def describe_device(device: torch.device) -> str:
    """For the title of a table."""
    return device.type if device.type != "cpu" else f"cpu, threads: {torch.get_num_threads()}"


def speedup(slow: Sequence[float], fast: Sequence[float]) -> float:
    return median(a / b for a, b in zip(slow, fast, strict=True))


def short(tokens: int) -> str:
    """A length in the short form of papers: 64k, 1M. 1000 stays 1000."""
    for size, unit in ((2**20, "M"), (2**10, "k")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)
