"""Windowed against full causal attention, on every backend that runs here.

On a CPU one head of 64 in one thread; `benchmark.py gpu` takes the heads of a model's layer. Full
attention and every window on every backend run in turns, length by length.
"""
# B batch, H query heads, G kv heads, T tokens, D head size

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._memory import is_out_of_memory
from benchmarks._options import BenchmarkOptions
from benchmarks._timing import (
    choose_device,
    describe_device,
    short,
    show_table,
    speedup,
    time_in_turns,
)
from bosch.backends._interface import AttentionCall
from bosch.hybrid import dispatch
from bosch.run.progress import say

# Reached by the sketch this was built from (CPU, one thread, fp32, D = 64); 0.9 of it is asked for.
SPEEDUPS = {(4096, 256): 6.0, (16_384, 256): 21.0}
SHARE_OF_SKETCH = 0.9
FULL, MASK = "full", "T x T mask"


SHOWS_TABLE = True  # so that benchmark.py prints only the rows with a target


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384)
    windows: tuple[int, ...] = (64, 128, 256, 512, 1024)
    heads: int = 1
    groups: int = 1
    head_size: int = 64
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    backends: tuple[str, ...] | None = None
    """None: sdpa on a CPU, every one that runs on a GPU."""
    with_mask: int = 4096
    """Up to this length the window as a T x T mask is a side too."""
    gradients: bool = False
    """Forward and backward instead of forward alone."""
    rounds: int = 7
    threads: int = 1
    device: str | None = None
    """None: the GPU if there is one."""


def gpu_options() -> tuple[Options, ...]:
    """A layer of Qwen3-1.7B, as evaluation and as training."""
    forward = Options(
        lengths=(4096, 32_768),
        windows=(1024,),
        heads=16,
        groups=8,
        head_size=128,
        dtype="bfloat16",
        with_mask=0,
    )
    return forward, replace(forward, gradients=True)


def measure(options: Options) -> list[dict[str, Any]]:
    device = choose_device(options.device)
    torch.set_num_threads(options.threads)
    backends = options.backends or runnable_backends(device)
    rows = [
        row
        for tokens in options.lengths
        for row in measure_length(tokens, backends, device, options)
    ]
    show_table(
        f"{kind(options)}, {options.heads} heads of {options.head_size}, {options.dtype}, "
        f"{describe_device(device)}: milliseconds, and how many times faster than full attention",
        ("T", "W", "backend", "full ms", "window ms", "faster", "of the ideal"),
        [describe(row) for row in rows],
    )
    return rows


def runnable_backends(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return dispatch.ORDER_ELSEWHERE
    runs = []
    for name in dispatch.ORDER_CUDA:
        reason = dispatch.BACKENDS[name].unavailable()
        if reason is None:
            runs.append(name)
        else:
            say(f"attention: {name} is not measured: {reason}")
    return tuple(runs)


def measure_length(
    tokens: int, backends: tuple[str, ...], device: torch.device, options: Options
) -> list[dict[str, Any]]:
    full = make_call(tokens, device, options)
    windows = [window for window in options.windows if window < tokens]
    sides = {FULL: timed(partial(dispatch.attend, full), full)}
    shown: dict[str, tuple[int, str]] = {}
    for window, backend in product(windows, backends):
        call = replace(full, window_tokens=window)
        name, side = f"{backend} {window}", timed(partial(dispatch.attend, call, backend), call)
        if can_run(side, name, tokens):
            sides[name], shown[name] = side, (window, backend)
    if windows and tokens <= options.with_mask:
        name = f"{MASK} {windows[-1]}"
        mask_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
        mask_TT = mask_TT.tril().triu(1 - windows[-1])
        sides[name] = timed(partial(attend_with_mask, full, mask_TT), full)
        shown[name] = (windows[-1], MASK)
    seconds = time_in_turns(sides, options.rounds, device)
    say(f"attention: {short(tokens)} tokens done")
    rows = []
    for name, (window, backend) in shown.items():
        row = {
            "name": f"{short(tokens)} tokens, window {window}, {backend}, {kind(options)}",
            "value": speedup(seconds[FULL], seconds[name]),
            "unit": "x faster than full",
            "tokens": tokens,
            "window": window,
            "backend": backend,
            "gradients": options.gradients,
            "full_seconds": median(seconds[FULL]),
            "window_seconds": median(seconds[name]),
            "ideal": ideal_speedup(tokens, window),
        }
        rows.append(row | target_of(row, device, options))
    return rows


def kind(options: Options) -> str:
    return "forward and backward" if options.gradients else "forward"


def make_call(tokens: int, device: torch.device, options: Options) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)

    def random(num_heads: int) -> Tensor:
        x_BHTD = torch.randn(1, num_heads, tokens, options.head_size, generator=generator)
        return x_BHTD.to(device, getattr(torch, options.dtype)).requires_grad_(options.gradients)

    return AttentionCall(
        random(options.heads),
        random(options.groups),
        random(options.groups),
        scaling=options.head_size**-0.5,
    )


def timed(attend: Callable[[], Tensor], call: AttentionCall) -> Callable[[], object]:
    """What is timed: forward and backward of a call that has gradients, else the forward alone."""
    if call.needs_grad:
        inputs = (call.q_BHTD, call.k_BGSD, call.v_BGSD)
        return lambda: torch.autograd.grad(attend().sum(), inputs)
    return lambda: without_autograd(attend)


@torch.inference_mode()
def without_autograd(attend: Callable[[], Tensor]) -> Tensor:
    return attend()


def attend_with_mask(call: AttentionCall, mask_TT: Tensor) -> Tensor:
    """The window as everybody would write it first: it skips nothing."""
    q_BHTD, k_BGSD, v_BGSD = call.q_BHTD, call.k_BGSD, call.v_BGSD
    return F.scaled_dot_product_attention(
        q_BHTD, k_BGSD, v_BGSD, mask_TT, scale=call.scaling, enable_gqa=call.is_grouped
    )


def can_run(side: Callable[[], object], name: str, tokens: int) -> bool:
    """Whether a side fits into memory and takes this call; if not, a line says why."""
    try:
        side()
    except Exception as error:
        if not isinstance(error, ValueError) and not is_out_of_memory(error):
            raise
        say(f"attention: {name} at {short(tokens)} tokens is left out: {error}")
        return False
    return True


def ideal_speedup(tokens: int, window: int) -> float:
    """Pairs of query and key in full attention for each in the window."""
    full = tokens * (tokens + 1) / 2
    return full / (window * (window + 1) / 2 + (tokens - window) * window)


def target_of(row: dict[str, Any], device: torch.device, options: Options) -> dict[str, float]:
    """Only for what the sketch was measured on."""
    as_sketch = (1, 1, 64, "float32", 1, False, "cpu", "sdpa")
    settings = (
        options.heads,
        options.groups,
        options.head_size,
        options.dtype,
        options.threads,
        options.gradients,
    )
    reached = SPEEDUPS.get((row["tokens"], row["window"]))
    if reached is None or (*settings, device.type, row["backend"]) != as_sketch:
        return {}
    return {"at_least": SHARE_OF_SKETCH * reached}


def describe(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        short(row["tokens"]),
        str(row["window"]),
        row["backend"],
        f"{1000 * row['full_seconds']:.2f}",
        f"{1000 * row['window_seconds']:.2f}",
        f"{row['value']:.2f}",
        f"{row['value'] / row['ideal']:.0%}",
    )
