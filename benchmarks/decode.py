"""Hybrid against dense: reading a prompt, each further token, and bytes of the cache.

By ratio and length. Dense is the plain model of transformers with its own attention (sdpa) and
cache; the hybrids have its weights. Ratio 0 is the hybrid with full attention everywhere: what it
gains over dense is a cache that does not copy itself for each token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from benchmarks._inference import decode, empty_cache, prefill
from benchmarks._models import make_dense, random_ids, read_shape, set_hybrid, spread_mask
from benchmarks._options import BenchmarkOptions
from benchmarks._timing import choose_device, describe_device, short, show_table, speedup
from bosch.hybrid.cache import kv_bytes
from bosch.hybrid.models import deploy
from bosch.run.progress import say

# The sketch this was built from, on one CPU thread: 8k tokens, window 512, 6 of 8 groups on it.
SKETCH = {"tokens": 8192, "window": 512, "ratio": 0.75}
SKETCH_PREFILL, SKETCH_DECODE, SKETCH_KV_SHARE = 2.1, 3.0, 0.30
SHARE_OF_SKETCH = 0.9
DENSE = "dense"


SHOWS_TABLE = True  # so that benchmark.py prints only the rows with a target


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: str = "mini"
    """A known shape (mini, Qwen3-1.7B, Qwen3-8B, Qwen3-14B) or a folder's config.json; the weights
    are random."""
    lengths: tuple[int, ...] = (2048, 8192, 16_384)
    ratios: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.875, 1.0)
    window: int = 512
    tokens: int = 8
    """Decoded by each side in each round."""
    prefill_rounds: int = 3
    rounds: int = 7
    """Of decoding."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    device: str | None = None
    """None: the GPU if there is one."""


@dataclass
class Side:
    """The dense model, or the hybrid at one ratio, with the prompt it has read last."""

    name: str
    ratio: float
    model: PreTrainedModel
    window: int
    cache: Cache | None = None

    def read(self, ids_BT: Tensor) -> float:
        """Seconds to read a prompt into a new cache."""
        self._set_up()
        self.cache = empty_cache(self.model)
        return sum(step.seconds for step in prefill(self.model, ids_BT, self.cache))

    def write(self, ids_BT: Tensor, num_tokens: int) -> float:
        """Seconds a token."""
        assert self.cache is not None
        self._set_up()
        return (
            sum(step.seconds for step in decode(self.model, ids_BT, self.cache, num_tokens))
            / num_tokens
        )

    def _set_up(self) -> None:
        if self.name != DENSE:
            set_hybrid(self.model, self.ratio, self.window)


def measure(options: Options) -> list[dict[str, Any]]:
    device = choose_device(options.device)
    torch.set_num_threads(options.threads)
    sides = make_sides(options, device)
    rows: list[dict[str, Any]] = []
    for tokens in options.lengths:
        rows += measure_length(sides, tokens, options, device)
        say(f"decode: {short(tokens)} tokens done")
    show_table(
        f"{options.model}, window {options.window}, {options.dtype}, {describe_device(device)}; "
        "in brackets: against dense",
        ("T", "side", "prefill s", "ms a token", "KV MB"),
        [describe(row, of_length(rows, row["tokens"])[DENSE]) for row in rows],
    )
    return rows + list(speedups(rows))


def make_sides(options: Options, device: torch.device) -> list[Side]:
    config, _ = read_shape(options.model)
    dense = make_dense(config, device, getattr(torch, options.dtype), attention="sdpa")
    everything = spread_mask(0.0, config.num_hidden_layers, config.num_key_value_heads)
    hybrid = deploy(dense, everything, options.window)
    hybrids = [Side(f"ratio {ratio:g}", ratio, hybrid, options.window) for ratio in options.ratios]
    return [Side(DENSE, 0.0, dense, options.window), *hybrids]


def measure_length(
    sides: list[Side], tokens: int, options: Options, device: torch.device
) -> list[dict[str, Any]]:
    ids = random_ids(sides[0].model.config, tokens, device)
    for side in sides:  # a first small prompt of each: kernels are chosen, masks made
        side.read(ids[:, : 2 * options.window])
        side.write(ids, 1)
    read: dict[str, list[float]] = {side.name: [] for side in sides}
    write: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(options.prefill_rounds):
        for side in sides:
            read[side.name].append(side.read(ids))
    held = {side.name: kv_bytes(side.cache) for side in sides if side.cache is not None}
    for side in sides:
        side.write(ids, 1)  # makes room behind the prompt, once
    for _ in range(options.rounds):
        for side in sides:
            write[side.name].append(side.write(ids, options.tokens))
    for side in sides:
        side.cache = None
    return [
        {
            "name": f"{short(tokens)} tokens, {side.name}: decoding",
            "value": 1000 * median(write[side.name]),
            "unit": "ms a token",
            "side": side.name,
            "tokens": tokens,
            "ratio": side.ratio,
            "window": None if side.name == DENSE else side.window,
            "prefill_seconds": median(read[side.name]),
            "kv_bytes": held[side.name],
            "prefill_speedup": speedup(read[DENSE], read[side.name]),
            "decode_speedup": speedup(write[DENSE], write[side.name]),
        }
        for side in sides
    ]


def of_length(rows: list[dict[str, Any]], tokens: int) -> dict[str, dict[str, Any]]:
    return {row["side"]: row for row in rows if row["tokens"] == tokens}


def speedups(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The figures that have a target, where this run has the sketch's shape."""
    for row in rows:
        if any(row[key] != value for key, value in SKETCH.items()):
            continue
        dense = of_length(rows, row["tokens"])[DENSE]
        place = f"{short(row['tokens'])} tokens, {row['side']} against dense"
        faster = (("prefill", SKETCH_PREFILL), ("decode", SKETCH_DECODE))
        for what, reached in faster:
            least = round(SHARE_OF_SKETCH * reached, 2)
            yield {
                "name": f"{place}: {what}",
                "value": row[f"{what}_speedup"],
                "unit": "x",
                "at_least": least,
            }
        share = row["kv_bytes"] / dense["kv_bytes"]
        yield {
            "name": f"{place}: KV bytes",
            "value": share,
            "unit": "x",
            "at_most": SKETCH_KV_SHARE,
        }


def describe(row: dict[str, Any], dense: dict[str, Any]) -> tuple[str, ...]:
    return (
        short(row["tokens"]),
        row["side"],
        f"{row['prefill_seconds']:.2f} ({row['prefill_speedup']:.2f}x)",
        f"{row['value']:.1f} ({row['decode_speedup']:.2f}x)",
        f"{row['kv_bytes'] / 1e6:.1f} ({row['kv_bytes'] / dense['kv_bytes']:.2f})",
    )
