"""One forward of the search for a mask: a plain model with z beside the dense model, at one length.

What a search costs is this times the masks it looks at. z spreads the ratio over all layers, full
and windowed groups side by side in each.
"""

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from benchmarks._models import make_dense, random_ids, read_shape, spread_mask
from benchmarks._options import BenchmarkOptions
from benchmarks._timing import (
    choose_device,
    describe_device,
    short,
    show_table,
    speedup,
    time_in_turns,
)

DENSE = "dense"


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: str = "mini"
    """A known shape (mini, Qwen3-1.7B, Qwen3-8B, Qwen3-14B) or a folder's config.json; the weights
    are random."""
    length: int = 4096
    window: int = 256
    ratios: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.875, 1.0)
    rounds: int = 3
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    device: str | None = None
    """None: the GPU if there is one."""


def gpu_options() -> tuple[Options, ...]:
    """An example of the paper's calibration set, whole."""
    return (Options(model="Qwen3-1.7B", length=32_768, window=1024, dtype="bfloat16"),)


@torch.inference_mode()
def measure(options: Options) -> list[dict[str, Any]]:
    device = choose_device(options.device)
    torch.set_num_threads(options.threads)
    config, _ = read_shape(options.model)
    model = make_dense(config, device, getattr(torch, options.dtype), attention="bosch")
    ids = random_ids(config, options.length, device)

    sides = {DENSE: partial(forward, model, ids)}
    for ratio in options.ratios:
        z = spread_mask(ratio, config.num_hidden_layers, config.num_key_value_heads)
        sides[f"ratio {ratio:g}"] = partial(
            forward, model, ids, bosch_mask=z, bosch_window=options.window
        )
    seconds = time_in_turns(sides, options.rounds, device)
    rows = [
        {
            "name": f"{options.model}, {short(options.length)} tokens in search mode, {side}",
            "value": median(seconds[side]),
            "unit": "s",
            "side": side,
            "tokens": options.length,
            "window": None if side == DENSE else options.window,
            "speedup": speedup(seconds[DENSE], seconds[side]),
            "tokens_per_second": options.length / median(seconds[side]),
        }
        for side in sides
    ]
    show_table(
        f"{options.model}, {short(options.length)} tokens, window {options.window}, "
        f"{options.dtype}, {describe_device(device)}",
        ("side", "seconds", "tokens/s", "faster than dense"),
        [
            (
                r["side"],
                f"{r['value']:.3f}",
                f"{r['tokens_per_second']:,.0f}",
                f"{r['speedup']:.2f}x",
            )
            for r in rows
        ],
    )
    return rows


def forward(model: PreTrainedModel, ids_BT: torch.Tensor, **search: Any) -> object:
    return model(ids_BT, use_cache=False, logits_to_keep=1, **search)
