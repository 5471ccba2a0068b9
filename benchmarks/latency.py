"""Measure prefill and decoding speed and peak memory by length: the paper's figures 5 and 6.

Figure 5 varies the ratio at one window (0: full attention), figure 6 the window at one ratio. Batch
1, with the prompt in chunks and random weights. A point that runs out of memory is recorded as
missing, with the memory in use. `--preset paper` is the paper's study (8B, up to 1M tokens, one
large GPU); `--preset mini` takes seconds on a CPU. Peak memory is that of a step (a chunk or a
decoded token), on a CPU of the whole process; p90 is the 90th percentile over the steps of a point.
KV bytes are those that the cache has allocated after the last token.
"""

import gc
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from benchmarks import _measure
from benchmarks._measure import DeviceOptions, PeakMemory, Row, now, random_ids, set_hybrid, short
from bosch.attention.cache import CACHE, allocated_bytes
from bosch.run.errors import is_out_of_memory
from bosch.run.progress import say, track
from bosch.training.rehearsal import as_hybrid

K = 1024
LAYER_SECONDS = 0.83e-3  # computed for a GPU: what Python takes to launch a layer of one token
SPEEDS = ("prefill_tokens_per_second", "decode_tokens_per_second")
FIGURES = (*SPEEDS, "p90_peak_bytes", "allocated_bytes")
TITLE = "{model}, {dtype}, {place}, batch 1, chunks of {chunk}"
COLUMNS = {"tokens": "tokens:,", "ratio": "ratio", "window": "window", "sink": "sink"}
COLUMNS |= {"prefill tokens/s": "prefill_tokens_per_second:,.0f"}
COLUMNS |= {"decode tokens/s": "decode_tokens_per_second:,.1f"}
COLUMNS |= {"p90 peak bytes": "p90_peak_bytes:,.0f", "KV allocated": "allocated_bytes:,"}
COLUMNS |= {"missing": "missing"}


@dataclass(frozen=True)
class Options(DeviceOptions):
    preset: Literal["mini", "paper"] = "mini"  # where the defaults of all other options come from
    # A known model (mini, Qwen3-1.7B, Qwen3-8B, Qwen3-14B) or a model folder, dense or hybrid.
    model: str = "mini"
    lengths: tuple[int, ...] = (512, 1024, 2048)  # lengths of the prompt, in tokens
    ratios: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.875)  # ratios to measure with --window
    window: int = 64  # window size in tokens for --ratios
    windows: tuple[int, ...] = (16, 32, 64, 128, 256)  # window sizes to measure with --window-ratio
    window_ratio: float = 0.75  # ratio for --windows
    sinks: tuple[str, ...] = ("none",)  # none, static or tokens=S: all are measured at each point
    chunk: int = 256  # tokens of the prompt to read at once
    tokens: int = 8  # tokens to decode after each prompt
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # number format
    # Time limit. When it is over, the remaining (longest) prompts are skipped. None: no limit.
    minutes: float | None = None


PAPER = Options(
    preset="paper",
    model="Qwen3-8B",
    lengths=(64 * K, 256 * K, 512 * K, 1024 * K),
    window=1024,
    windows=(256, 512, 1024, 2048, 4096),
    sinks=("none", "static"),  # static ones are what the chain makes by default
    chunk=8192,
    tokens=32,
    dtype="bfloat16",
)
PRESETS = {"mini": Options(), "paper": PAPER}


def measure(options: Options) -> Iterator[Row]:
    """One row per point, from short prompts to long ones. If a prompt is missing, so are longer
    ones with the same settings."""
    device = options.start()
    config = as_hybrid(_measure.read_shape(options.model), ratio=0.0, window_tokens=1)
    model = _measure.make_model(config, device, getattr(torch, options.dtype), "bosch")
    settings = [(ratio, options.window) for ratio in options.ratios]
    settings += [(options.window_ratio, window) for window in options.windows]
    points = list(product(dict.fromkeys(settings), options.sinks))  # each once
    # Libraries choose kernels and allocate workspaces, some for each shape; a chunk behind another.
    ids = random_ids(config, min(2 * options.chunk, max(options.lengths)), device)
    for (ratio, window), sink in points:
        set_hybrid(model, ratio, window, sink)
        measure_prompt(model, ids, options)
        gc.collect()
        torch.cuda.empty_cache()
    lengths = sorted(set(options.lengths))
    deadline = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    missing: dict[object, str] = {}
    with track("latency", len(lengths) * len(points), "prompts") as bar:
        for tokens, place in product(lengths, points):
            (ratio, window), sink = place
            point = f"{short(tokens)} tokens, ratio {ratio:g}, window {window}, sink {sink}"
            row: Row = {"name": f"{options.model}, {point}", "model": options.model}
            row |= {"tokens": tokens, "ratio": ratio, "window": window, "sink": sink}
            row |= {"chunk": options.chunk, "missing": missing.get(place)}
            row |= dict.fromkeys(FIGURES)
            if row["missing"] is None and time.monotonic() > deadline:
                row["missing"] = "out of time"
            if row["missing"] is None:
                set_hybrid(model, ratio, window, sink)
                ids = random_ids(config, tokens, device)
                row |= measure_prompt(model, ids, options)
                # Free the cache, and what the frames of an error hold, before the next point.
                gc.collect()
                torch.cuda.empty_cache()
            row |= {"value": row["prefill_tokens_per_second"], "unit": "tokens/s of prefill"}
            if device.type == "cuda":
                seconds = LAYER_SECONDS * config.num_hidden_layers
                row |= {"figure": "decode_tokens_per_second", "computed": 1 / seconds}
            if row["missing"] is not None:
                missing[place] = row["missing"]
                say(f"{row['name']}: {row['missing']}")
                row["value"] = row.pop("bytes_in_use", 0) / 1e9
                row["unit"] = f"GB in use, then {row['missing']}"
            yield row
            bar.advance()


def measure_prompt(model: PreTrainedModel, ids_BT: Tensor, options: Options) -> Row:
    """The figures of one prompt, or why they are missing. Which tokens are decoded does not affect
    the time."""
    # The cache that `generate` would make. A hybrid replaces it by its own.
    memory, cache = PeakMemory(ids_BT.device), DynamicCache(config=model.config)
    prompt, answer = ids_BT.split(options.chunk, dim=1), ids_BT[:, : options.tokens].split(1, dim=1)
    try:
        prefill = list(run_steps(model, prompt, cache))
        decode = list(run_steps(model, answer, cache))
        peaks = [float(peak) for _, peak in prefill + decode if peak is not None]
        reading = ids_BT.shape[1] / sum(seconds for seconds, _ in prefill)
        writing = 1 / median(seconds for seconds, _ in decode)
        p90 = float(np.quantile(peaks, 0.9)) if peaks else None
        return dict(zip(FIGURES, (reading, writing, p90, allocated_bytes(cache)), strict=True))
    # The kernels of a device can report missing memory by errors of their own.
    except Exception as error:
        if not (isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error)):
            raise
        return {"missing": "out of memory", "bytes_in_use": memory.read() or 0}


@torch.inference_mode()
def run_steps(
    model: PreTrainedModel, pieces: Iterable[Tensor], cache: Cache
) -> Iterator[tuple[float, int | None]]:
    """Seconds and peak bytes for reading each piece of a text into the cache. Logits are computed
    for its last token only."""
    for ids_BT in pieces:
        memory, begin = PeakMemory(ids_BT.device), now(ids_BT.device)
        model(ids_BT, use_cache=True, **{CACHE: cache}, logits_to_keep=1)
        yield now(ids_BT.device) - begin, memory.read()
