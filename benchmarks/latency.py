"""The paper's figures 5 and 6: prefill and decoding in tokens/s and peak memory, by length.

Figure 5 varies the ratio at one window, figure 6 the window at one ratio; ratio 0 is full attention
everywhere. Batch 1, the prompt in chunks. A point that runs out of memory is kept as missing, with
what was in use. Weights are random unless --model is a folder that has some: they change no time.
`--preset paper` is the paper's study (8B, up to 1M tokens, one large GPU), `--preset mini` takes
seconds on a CPU.

The peak of each step, a chunk or a decoded token, is noted; p90 is the 90th percentile over the
steps of a point. On a GPU it is what torch has allocated, on a CPU the whole process.
"""

import gc
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from benchmarks._memory import PeakMemory, is_out_of_memory
from benchmarks._models import make_hybrid, random_ids, read_shape, set_hybrid
from benchmarks._options import DeviceOptions
from benchmarks._timing import describe_device, now, short
from bosch.hybrid.cache import kv_bytes
from bosch.run.progress import say, track
from bosch.run.tables import show_table

K = 1024


@dataclass(frozen=True)
class Options(DeviceOptions):
    preset: Literal["mini", "paper"] = "mini"
    """What is not said is this preset's."""
    model: str = "mini"
    """A known shape (mini, Qwen3-1.7B, Qwen3-8B, Qwen3-14B) or a folder, plain or hybrid."""
    lengths: tuple[int, ...] = (512, 1024, 2048)
    """Tokens of the prompt."""
    ratios: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.875)
    window: int = 64
    """Of the ratios."""
    windows: tuple[int, ...] = (16, 32, 64, 128, 256)
    window_ratio: float = 0.75
    """Of the windows."""
    chunk: int = 256
    """Tokens of the prompt that are read at once."""
    tokens: int = 8
    """Decoded after each prompt."""
    rounds: int = 2
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    minutes: float | None = None
    """After this time what is left is skipped, the longest prompts. None: no limit."""
    memory_gb: float | None = None
    """Let torch take no more of a GPU, as on a smaller one."""
    picture: Path | None = None
    """PNG of both figures."""


PAPER = Options(
    preset="paper",
    model="Qwen3-8B",
    lengths=(64 * K, 256 * K, 512 * K, 1024 * K),
    window=1024,
    windows=(256, 512, 1024, 2048, 4096),
    chunk=8192,
    tokens=32,
    rounds=1,
    dtype="bfloat16",
)
PRESETS = {"mini": Options(), "paper": PAPER}


def gpu_options() -> tuple[Options, ...]:
    """What fits into minutes."""
    lengths, windows = (64 * K, 256 * K), (256, 1024, 4096)
    return (replace(PAPER, model="Qwen3-1.7B", lengths=lengths, windows=windows, minutes=4),)


@dataclass(frozen=True)
class Point:
    tokens: int
    ratio: float
    window: int

    def __str__(self) -> str:
        return f"{short(self.tokens)} tokens, ratio {self.ratio:g}, window {self.window}"


@dataclass
class Found:
    """What the rounds of a point gave, or why it is missing."""

    prefill_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)  # a token
    peaks: list[int] = field(default_factory=list)  # bytes, of every step; none where unknown
    kv_bytes: int = 0
    missing: str | None = None


class OutOfTimeError(Exception):
    """--minutes have passed."""


def measure(options: Options) -> list[dict[str, Any]]:
    device = options.start()
    config, folder = read_shape(options.model)
    say(f"latency: {options.model}, {'random weights' if folder is None else 'its own weights'}")
    model = make_hybrid(config, folder, device, getattr(torch, options.dtype))
    if options.memory_gb is not None:
        if device.type != "cuda":
            raise ValueError("--memory-gb limits a GPU; there is none here, or --device cpu.")
        total = torch.cuda.get_device_properties(device).total_memory
        share = min(1.0, options.memory_gb * 1e9 / total)
        torch.cuda.set_per_process_memory_fraction(share, device)
    results = measure_points(model, options, device)
    rows = [make_row(options, point, found) for point, found in results.items()]
    show_table(
        f"{options.model}, {options.dtype}, {describe_device(device)}, batch 1, "
        f"chunks of {options.chunk}",
        ("T", "ratio", "W", "prefill tokens/s", "decode tokens/s", "p90 peak GB", "KV GB", ""),
        [describe(row) for row in rows],
    )
    if options.picture:
        draw_figures(rows, options, options.picture)
    return rows


def measure_points(
    model: PreTrainedModel, options: Options, device: torch.device
) -> dict[Point, Found]:
    """Every point, from the short prompts to the long; those of one length in turns. A prompt is
    missing where a shorter one with the same settings is: it needs more.
    """
    settings = [(ratio, options.window) for ratio in options.ratios]
    settings += [(options.window_ratio, window) for window in options.windows]
    settings = list(dict.fromkeys(settings))
    lengths = sorted(set(options.lengths))
    results = {Point(tokens, *setting): Found() for tokens in lengths for setting in settings}
    warm_up(model, options, device)
    deadline = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    missing: dict[tuple[float, int], str | None] = {}
    with track("latency", len(results) * options.rounds, "prompts") as bar:
        for tokens in lengths:
            ids = random_ids(model.config, tokens, device)
            for _ in range(options.rounds):
                for setting in settings:
                    point = Point(tokens, *setting)
                    found = results[point]
                    found.missing = missing.get(setting)
                    if found.missing is None:
                        measure_point(model, ids, point, options, found, deadline)
                        missing[setting] = found.missing
                    bar.advance()
    return results


def warm_up(model: PreTrainedModel, options: Options, device: torch.device) -> None:
    """Kernels are chosen and loaded, libraries take their workspaces."""
    ids = random_ids(model.config, min(2 * options.chunk, min(options.lengths)), device)
    for ratio in (0.0, 0.5):
        set_hybrid(model, ratio, options.window)
        cache = DynamicCache(config=model.config)
        for _ in run_steps(
            model, [*ids.split(options.chunk, dim=1), ids[:, :1], ids[:, :1]], cache
        ):
            pass


def measure_point(
    model: PreTrainedModel,
    ids_BT: Tensor,
    point: Point,
    options: Options,
    found: Found,
    deadline: float,
) -> None:
    """One prompt more of this point, into `found`. Which tokens are decoded changes no time."""
    set_hybrid(model, point.ratio, point.window)
    # What `generate` would take: transformers' own, which a hybrid turns into one of its own.
    memory, cache = PeakMemory(ids_BT.device), DynamicCache(config=model.config)
    prompt, answer = ids_BT.split(options.chunk, dim=1), ids_BT[:, : options.tokens].split(1, dim=1)
    try:
        read = list(run_steps(model, prompt, cache, deadline))
        held = kv_bytes(cache)
        written = list(run_steps(model, answer, cache, deadline))
        found.prefill_seconds.append(sum(seconds for seconds, _ in read))
        found.decode_seconds.append(median(seconds for seconds, _ in written))
        found.peaks += [peak for _, peak in read + written if peak is not None]
        found.kv_bytes = held
    except OutOfTimeError:
        found.missing = "out of time"
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found.missing = "out of memory"
        found.peaks = [memory.read() or 0]
    # What an error's frames and the cache held goes back before the next point is measured.
    del cache
    gc.collect()
    if ids_BT.device.type == "cuda":
        torch.cuda.empty_cache()
    if found.missing:
        say(f"latency: {point}: {found.missing}")


@torch.inference_mode()
def run_steps(
    model: PreTrainedModel, pieces: Iterable[Tensor], cache: Cache, deadline: float = math.inf
) -> Iterator[tuple[float, int | None]]:
    """Seconds and peak bytes of each piece of a text, read into the cache. Of its logits only the
    last token's.
    """
    for ids_BT in pieces:
        memory, begin = PeakMemory(ids_BT.device), now(ids_BT.device)
        model(ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        yield now(ids_BT.device) - begin, memory.read()
        if time.monotonic() > deadline:
            raise OutOfTimeError


def make_row(options: Options, point: Point, found: Found) -> dict[str, Any]:
    row = {
        "name": f"{options.model}, {point}",
        "model": options.model,
        **asdict(point),
        "chunk": options.chunk,
        "missing": found.missing,
        "prefill_tokens_per_second": None,
        "decode_tokens_per_second": None,
        "p90_peak_bytes": None,
        "kv_bytes": None,
    }
    if found.missing:
        in_use = max(found.peaks, default=0) / 1e9
        return row | {"value": in_use, "unit": f"GB in use, then {found.missing}"}
    speed = point.tokens / median(found.prefill_seconds)
    peaks = torch.tensor(found.peaks, dtype=torch.float64)
    return row | {
        "value": speed,
        "unit": "tokens/s of prefill",
        "prefill_tokens_per_second": speed,
        "decode_tokens_per_second": 1 / median(found.decode_seconds),
        "p90_peak_bytes": float(peaks.quantile(0.9)) if found.peaks else None,
        "kv_bytes": found.kv_bytes,
    }


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


def draw_figures(rows: list[dict[str, Any]], options: Options, path: Path) -> None:
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
        [(ratio, options.window) for ratio in options.ratios],
        [(options.window_ratio, window) for window in options.windows],
    )
    for axes, settings in zip(figure.subplots(2, 3), lines, strict=True):
        for axis, (title, (name, scale)) in zip(axes, panels.items(), strict=True):
            for ratio, window in settings:
                chosen = [r for r in rows if (r["ratio"], r["window"]) == (ratio, window)]
                here = [(r["tokens"], r[name] * scale) for r in chosen if r[name] is not None]
                if here:
                    label = f"ratio {ratio:g}, window {window}"
                    axis.plot(*zip(*here, strict=True), marker="o", label=label)
            axis.set(title=title, xlabel="tokens")
            axis.set_xscale("log", base=2)
            ticks = sorted(set(options.lengths))
            axis.set_xticks(ticks, [short(tokens) for tokens in ticks])
            axis.set_ylim(bottom=0)
        axes[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})
