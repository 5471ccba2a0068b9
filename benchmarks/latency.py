"""The paper's figures 5 and 6: prefill and decoding in tokens/s and peak memory, by length.

Figure 5 varies the ratio at one window, figure 6 the window at one ratio; batch 1, the prompt in
chunks. A point that runs out of memory is kept as missing, with what was in use. Weights are random
unless --model is a folder that has some: they change no time. `--preset paper` is the paper's
study (8B, up to 1M tokens, one large GPU), `--preset mini` takes seconds on a CPU.

The peak of each step, a chunk or a decoded token, is noted; p90 is the 90th percentile over the
steps of a point. On a GPU it is what torch has allocated, on a CPU the whole process.
"""

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from benchmarks._inference import Step, decode, empty_cache, prefill
from benchmarks._memory import PeakMemory, is_out_of_memory, limit_memory
from benchmarks._models import make_hybrid, random_ids, read_shape, set_hybrid
from benchmarks._options import BenchmarkOptions
from benchmarks._timing import choose_device, describe_device, short, show_table
from bosch.hybrid.cache import kv_bytes
from bosch.run.progress import say, track

K = 1024


@dataclass(frozen=True)
class Study:
    """What is measured."""

    model: str
    lengths: tuple[int, ...]
    ratios: tuple[float, ...]  # at `window`: figure 5
    window: int
    windows: tuple[int, ...]  # at `window_ratio`: figure 6
    window_ratio: float
    chunk: int
    tokens: int  # decoded after each prompt
    rounds: int
    dtype: str


PRESETS = {
    "paper": Study(
        model="Qwen3-8B",
        lengths=(64 * K, 256 * K, 512 * K, 1024 * K),
        ratios=(0.0, 0.25, 0.5, 0.75, 0.875),
        window=1024,
        windows=(256, 512, 1024, 2048, 4096),
        window_ratio=0.75,
        chunk=8192,
        tokens=32,
        rounds=1,
        dtype="bfloat16",
    ),
    "mini": Study(
        model="mini",
        lengths=(512, 1024, 2048),
        ratios=(0.0, 0.25, 0.5, 0.75, 0.875),
        window=64,
        windows=(16, 32, 64, 128, 256),
        window_ratio=0.75,
        chunk=256,
        tokens=8,
        rounds=2,
        dtype="float32",
    ),
}


SHOWS_TABLE = True  # so that benchmark.py prints only the rows with a target


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    preset: Literal["paper", "mini"] | None = None
    """None: paper with a GPU, mini without. The settings that are None are the preset's."""
    model: str | None = None
    """A known shape (mini, Qwen3-1.7B, Qwen3-8B, Qwen3-14B) or a folder, plain or hybrid."""
    lengths: tuple[int, ...] | None = None
    """Tokens of the prompt."""
    ratios: tuple[float, ...] | None = None
    window: int | None = None
    """Of the ratios."""
    windows: tuple[int, ...] | None = None
    window_ratio: float | None = None
    """Of the windows."""
    chunk: int | None = None
    """Tokens of the prompt that are read at once."""
    tokens: int | None = None
    """Decoded after each prompt."""
    rounds: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    minutes: float | None = None
    """After this time what is left is skipped, the longest prompts. None: no limit."""
    memory_gb: float | None = None
    """Take no more, as on a smaller GPU; on a CPU beside what the process has at the start."""
    picture: Path | None = None
    """PNG of both figures."""
    threads: int = 1
    device: str | None = None
    """None: the GPU if there is one."""

    def study(self, device: torch.device) -> Study:
        preset = self.preset or ("paper" if device.type == "cuda" else "mini")
        values = asdict(PRESETS[preset])
        given = {name: getattr(self, name) for name in values if getattr(self, name) is not None}
        return Study(**{**values, **given})


@dataclass(frozen=True)
class Point:
    tokens: int
    ratio: float
    window: int

    def __str__(self) -> str:
        return f"{short(self.tokens)} tokens, ratio {self.ratio:g}, window {self.window}"


@dataclass
class Rounds:
    """What the rounds of a point gave, or why it is missing."""

    prefill_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)  # a token
    peaks: list[int | None] = field(default_factory=list)  # bytes, of every step
    kv_bytes: int = 0
    missing: str | None = None

    def add(self, read: list[Step], written: list[Step]) -> None:
        self.prefill_seconds.append(sum(step.seconds for step in read))
        self.decode_seconds.append(median(step.seconds for step in written))
        self.peaks += [step.peak_bytes for step in read + written]


class OutOfTimeError(Exception):
    """--minutes have passed."""


def gpu_options() -> tuple[Options, ...]:
    """What fits into minutes."""
    few = Options(
        preset="paper",
        model="Qwen3-1.7B",
        lengths=(64 * K, 256 * K),
        windows=(256, 1024, 4096),
        minutes=4,
    )
    return (few,)


def measure(options: Options) -> list[dict[str, Any]]:
    device = choose_device(options.device)
    torch.set_num_threads(options.threads)
    study = options.study(device)
    config, folder = read_shape(study.model)
    say(f"latency: {study.model}, {'random weights' if folder is None else 'its own weights'}")
    model = make_hybrid(config, folder, device, getattr(torch, study.dtype))
    with limit_memory(device, options.memory_gb):
        results = measure_points(model, study, device, options.minutes)
    rows = [make_row(study, point, rounds) for point, rounds in results.items()]
    show_table(
        f"{study.model}, {study.dtype}, {describe_device(device)}, batch 1, "
        f"chunks of {study.chunk}",
        ("T", "ratio", "W", "prefill tokens/s", "decode tokens/s", "p90 peak GB", "KV GB", ""),
        [describe(row) for row in rows],
    )
    if options.picture:
        draw_figures(rows, study, options.picture)
    return rows


def measure_points(
    model: PreTrainedModel, study: Study, device: torch.device, minutes: float | None
) -> dict[Point, Rounds]:
    """Every point, from the short prompts to the long; those of one length in turns."""
    results = {point: Rounds() for point in points_of(study)}
    warm_up(model, study, device)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    with track("latency", len(results) * study.rounds, "prompts") as bar:
        for tokens in sorted(set(study.lengths)):
            ids = random_ids(model.config, tokens, device)
            for _ in range(study.rounds):
                for point in (p for p in results if p.tokens == tokens):
                    if (smaller := missing_before(results, point)) is not None:
                        results[point].missing = smaller
                    if results[point].missing is None:
                        measure_point(model, ids, point, study, results[point], deadline)
                    bar.advance()
    return results


def points_of(study: Study) -> Iterator[Point]:
    settings = [(ratio, study.window) for ratio in study.ratios]
    settings += [(study.window_ratio, window) for window in study.windows]
    for tokens in sorted(set(study.lengths)):
        for ratio, window in dict.fromkeys(settings):
            yield Point(tokens, ratio, window)


def missing_before(results: dict[Point, Rounds], point: Point) -> str | None:
    """Why a shorter prompt with the same settings is missing: a longer one needs more."""
    for other, rounds in results.items():
        same = (other.ratio, other.window) == (point.ratio, point.window)
        if same and other.tokens < point.tokens and rounds.missing:
            return rounds.missing
    return None


def warm_up(model: PreTrainedModel, study: Study, device: torch.device) -> None:
    """Kernels are chosen and loaded, libraries take their workspaces."""
    ids = random_ids(model.config, min(2 * study.chunk, min(study.lengths)), device)
    for ratio in (0.0, 0.5):
        set_hybrid(model, ratio, study.window)
        cache = empty_cache(model)
        for _ in (*prefill(model, ids, cache, study.chunk), *decode(model, ids, cache, 2)):
            pass


def measure_point(
    model: PreTrainedModel,
    ids_BT: torch.Tensor,
    point: Point,
    study: Study,
    rounds: Rounds,
    deadline: float | None,
) -> None:
    """One prompt more of this point, into `rounds`."""
    set_hybrid(model, point.ratio, point.window)
    memory, cache = PeakMemory(ids_BT.device), empty_cache(model)
    try:
        read = list(in_time(prefill(model, ids_BT, cache, study.chunk), deadline))
        held = kv_bytes(cache)
        written = list(in_time(decode(model, ids_BT, cache, study.tokens), deadline))
        rounds.add(read, written)
        rounds.kv_bytes = held
    except OutOfTimeError:
        rounds.missing = "out of time"
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        rounds.missing = "out of memory"
        rounds.peaks = [memory.read()]
    # What an error's frames and the cache held goes back before the next point is measured.
    del cache
    gc.collect()
    if ids_BT.device.type == "cuda":
        torch.cuda.empty_cache()
    if rounds.missing:
        say(f"latency: {point}: {rounds.missing}")


def in_time(steps: Iterable[Step], deadline: float | None) -> Iterator[Step]:
    for step in steps:
        yield step
        if deadline is not None and time.monotonic() > deadline:
            raise OutOfTimeError


def make_row(study: Study, point: Point, rounds: Rounds) -> dict[str, Any]:
    row = {
        "name": f"{study.model}, {point}",
        "model": study.model,
        "tokens": point.tokens,
        "ratio": point.ratio,
        "window": point.window,
        "chunk": study.chunk,
        "missing": rounds.missing,
        "prefill_tokens_per_second": None,
        "decode_tokens_per_second": None,
        "p90_peak_bytes": None,
        "kv_bytes": None,
    }
    known = [peak for peak in rounds.peaks if peak is not None]
    if rounds.missing:
        in_use = max(known, default=0) / 1e9
        return row | {"value": in_use, "unit": f"GB in use, then {rounds.missing}"}
    speed = point.tokens / median(rounds.prefill_seconds)
    return row | {
        "value": speed,
        "unit": "tokens/s of prefill",
        "prefill_tokens_per_second": speed,
        "decode_tokens_per_second": 1 / median(rounds.decode_seconds),
        "p90_peak_bytes": percentile(known, 0.9) if known else None,
        "kv_bytes": rounds.kv_bytes,
    }


def percentile(values: list[int], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def describe(row: dict[str, Any]) -> tuple[str | None, ...]:
    def number(name: str, scale: float, digits: int) -> str | None:
        return None if row[name] is None else f"{row[name] * scale:,.{digits}f}"

    return (
        short(row["tokens"]),
        f"{row['ratio']:g}",
        str(row["window"]),
        number("prefill_tokens_per_second", 1, 0),
        number("decode_tokens_per_second", 1, 1),
        number("p90_peak_bytes", 1e-9, 2),
        number("kv_bytes", 1e-9, 3),
        row["missing"] or "",
    )


def draw_figures(rows: list[dict[str, Any]], study: Study, path: Path) -> None:
    """Both figures as the paper draws them, one above the other; missing points are missing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = {
        "prefill, tokens/s": ("prefill_tokens_per_second", 1.0),
        "decoding, tokens/s": ("decode_tokens_per_second", 1.0),
        "p90 peak memory, GB": ("p90_peak_bytes", 1e-9),
    }
    lines = (
        [(f"ratio {r:g}, window {study.window}", r, study.window) for r in study.ratios],
        [
            (f"window {w}, ratio {study.window_ratio:g}", study.window_ratio, w)
            for w in study.windows
        ],
    )
    for axes, settings in zip(figure.subplots(2, 3), lines, strict=True):
        for axis, (title, (name, scale)) in zip(axes, panels.items(), strict=True):
            for label, ratio, window in settings:
                chosen = [r for r in rows if (r["ratio"], r["window"]) == (ratio, window)]
                here = [(r["tokens"], r[name] * scale) for r in chosen if r[name] is not None]
                axis.plot(*zip(*here, strict=True), marker="o", label=label) if here else None
            axis.margins(y=0.1)
            axis.set(title=title, xlabel="tokens")
            axis.set_xscale("log", base=2)
            ticks = sorted(set(study.lengths))
            axis.set_xticks(ticks, [short(tokens) for tokens in ticks])
            axis.set_ylim(bottom=0)
        axes[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})
