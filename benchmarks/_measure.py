"""What all benchmarks share: their options, time, peak memory, and models with random weights.

Other work on the machine slows whatever runs at that moment. So each round runs every side once. A
time is the median over rounds, and a speed-up is the median of the rounds' speed-ups. With one CPU
thread we measure its CPU time, which other processes hardly affect; otherwise wall-clock time. One
set of random weights serves all ratios: the time of attention does not depend on it.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from bosch.eval.report.intervals import Numbers, draw_errors_of_mean
from bosch.hybrid.models import read_sink
from bosch.known_models import SHAPES, known_config
from bosch.masks.mask import spread_mask
from bosch.plugins import suggest
from bosch.run import files
from bosch.run.errors import UserError
from bosch.run.progress import show_rows
from bosch.sink import KEY, VALUE, Sink, is_sink_parameter
from bosch.training.model_start import read_config

Row = dict[str, Any]  # one result: name, value, unit, and whatever its benchmark adds
HIDE = "--device cpu: hide the GPUs; set CUDA_VISIBLE_DEVICES to nothing."
PROCESS = Path("/proc/self")
LEAST_SECONDS = 0.02  # of what is timed at once


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
        there = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        # A row of another device than the one asked for would be taken for a measurement of it.
        if self.device.partition(":")[0] not in there:
            problem = f"--device {self.device}: this machine has no such device"
            raise UserError(f"{problem}. Leave the option out, or use cpu.")
        if self.device == "cpu" and torch.cuda.is_available():  # what is measured may choose itself
            raise UserError(HIDE)
        return torch.device(self.device)

    @property
    def place(self) -> str:
        """For the title of a table."""
        kind = self.start().type
        return kind if kind != "cpu" else f"cpu, threads: {self.threads}"


def run_part(benchmark: ModuleType, options: Any) -> Iterator[Row]:
    """The rows of a benchmark. After the last its table is printed: `COLUMNS`, below its `TITLE`,
    in which options stand for themselves."""
    rows = []
    for row in benchmark.measure(options):
        rows.append(row)
        yield row
    if hasattr(benchmark, "COLUMNS"):
        title = benchmark.TITLE.format(place=getattr(options, "place", ""), **vars(options))
        show_rows(title, rows, benchmark.COLUMNS)


def time_in_turns(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    set_up: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds per call of each side in each round. The first calls are not counted, nor is `set_up`
    of a side before its calls of a round. A fast side is called several times per round."""

    def seconds_of(side: Callable[[], object], calls: int = 1) -> float:
        begin = now(device)
        for _ in range(calls):
            side()
        return (now(device) - begin) / calls

    calls = {}
    for name, side in sides.items():
        set_up(name)
        seconds_of(side)  # compiles and fills caches
        # Clocks and schedulers are coarse: what is timed at once takes long enough for them.
        calls[name] = max(1, math.ceil(LEAST_SECONDS / max(seconds_of(side), 1e-9)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            set_up(name)
            seconds[name].append(seconds_of(side, calls[name]))
    return seconds


def now(device: torch.device) -> float:
    """CPU or wall-clock time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # With several threads CPU time adds them up; with a GPU the host only waits.
    counts_cpu_time = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if counts_cpu_time else time.perf_counter()


def speedup(slow: Sequence[float], fast: Sequence[float]) -> float:
    return median(a / b for a, b in zip(slow, fast, strict=True))


def difference_of_sets(differences_TSQ: Sequence[Numbers]) -> str:
    """The mean of the tasks, with a 95 % interval over questions and sets. A task has as many rows
    as there are calibration sets, or seeds, and a column for each question, which all were asked.

    What a set chooses differs more than what questions say, so with several the error of their mean
    is in the interval.
    """
    draw, drawn = np.random.default_rng(0), np.zeros(2_000)
    for differences_SQ in differences_TSQ:
        # Each question counts by what it says of all sets.
        differences_Q = differences_SQ.mean(axis=0)
        places_DQ = draw.integers(len(differences_Q), size=(len(drawn), len(differences_Q)))
        drawn += differences_Q[places_DQ].mean(axis=1) / len(differences_TSQ)
    by_set = np.mean([differences_SQ.mean(axis=1) for differences_SQ in differences_TSQ], axis=0)
    drawn += draw_errors_of_mean(by_set.tolist(), count=len(drawn))
    counts = [differences_SQ.shape[1] for differences_SQ in differences_TSQ]
    return shown_difference(by_set.mean(), drawn, counts)


def shown_difference(points: float, drawn: Numbers, counts: Sequence[int]) -> str:
    """`+1.2 [-0.5, +3.1]`: a difference and, of its draws, a 95 % interval. counts: questions of
    each task."""
    low, high = np.percentile(drawn, [2.5, 97.5])
    if low < high:
        return f"{points:+.1f} [{low:+.1f}, {high:+.1f}]"
    # All questions say the same, mostly that nothing differs. What happens in none of n questions
    # happens in at most 3 in n, at a level of 95 %.
    bound = min(100, 300 / min(counts)) / len(counts)
    return f"{points:+.1f} [±{bound:.1f}]"


class PeakMemory:
    """The peak since this was made: of torch's allocations on a GPU, else of the whole process,
    which only Linux knows."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_known = device, False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):
                (PROCESS / "clear_refs").write_text("5")  # resets VmHWM
                self._is_known = True

    def read(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        status = (PROCESS / "status").read_text() if self._is_known else ""
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(peak[1]) * 1024 if peak else None


def short(tokens: int) -> str:
    """A length in the short form of papers: 64k, 1M. 1000 stays 1000."""
    for size, unit in ((2**20, "M"), (2**10, "k")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def read_shape(model: str) -> PretrainedConfig:
    """The config of a known model (`Qwen3-8B`, `Qwen/Qwen3-8B-Base`) or of a folder."""
    config = read_config(Path(model)) if Path(model).is_dir() else known_config(model)
    if config is None:
        raise UserError(
            f"--model {model}: neither a folder nor a known model; {suggest(model, list(SHAPES))}"
        )
    return config


def make_model(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """A model with random weights, created on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    return model.eval()


def set_hybrid(
    model: Any,
    ratio: float,
    window_tokens: int,
    sink: str = "none",
    num_full: Sequence[int] | None = None,
) -> None:
    """Put this share of the groups on the window, as `spread_mask` does, or leave so many of each
    layer full. Use new caches."""
    groups = model.config.num_key_value_heads
    if num_full is None:
        z: Sequence[Sequence[int]] = spread_mask(ratio, model.config.num_hidden_layers, groups)
    else:
        # In order, full groups first, as materialize leaves them: the cache needs no permutation.
        z = [[1] * count + [0] * (groups - count) for count in num_full]
    changes = {"window": window_tokens, "num_full": [sum(row) for row in z]}
    model.config.bosch = {**model.config.bosch, **changes, "sink": Sink.parse(sink).to_json()}
    # The model serves many settings: a sink of the one before would stay registered.
    for layer in model.base_model.layers:  # those of the setting before
        layer.self_attn.register_parameter(KEY, None)
        layer.self_attn.register_parameter(VALUE, None)
    read_sink(model)
    same = torch.Generator(model.device).manual_seed(0)  # random values, but always these
    for name, parameter in model.named_parameters():
        if is_sink_parameter(name):
            parameter.data.normal_(generator=same)


def read_rows(file: Path) -> list[Row]:
    """None if there is no file yet. A last line that a kill cut off is left out."""
    return [row for _, row in files.read_lines(file) if row is not None]


def append_row(file: Path, row: Row) -> None:
    append_rows(file, [row])


def append_rows(file: Path, rows: Iterable[Row]) -> None:
    files.drop_torn_line(file)
    with file.open("a") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def random_ids(config: PretrainedConfig, num_tokens: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (1, num_tokens), generator=generator).to(device)
