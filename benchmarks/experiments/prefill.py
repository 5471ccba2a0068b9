"""Reading a prompt, warm: what windows save, what fused norms save, and a chunk behind a past."""
# B batch, H query heads, G kv heads, T queries, S keys, D head size

from collections.abc import Sequence
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from benchmarks._measure import Row, short, time_in_turns
from benchmarks.experiments._points import (
    DENSE,
    PLAIN,
    STATIC,
    K,
    Models,
    Point,
    Points,
    Side,
    faster_from,
    free_memory,
    prompt_lengths,
)
from benchmarks.latency import run_steps
from bosch.attention.backends.sdpa import prefers_cudnn
from bosch.attention.call import AttentionCall
from bosch.attention.dispatch import attend
from bosch.training.loss import install_kernels

MINUTES = 1.2
SIDES = (DENSE, PLAIN, STATIC)
# Of Qwen3-1.7B, in tokens per second at 8k: as fast as the dense model; and with fused norms.
COMPUTED, COMPUTED_FUSED = 97_000.0, 140_000.0
COMPUTED_TFLOPS = 600.0  # attention to a past by cuDNN
models = cache(Models)


def points(device: torch.device) -> Points:
    for tokens in prompt_lengths(device):
        yield Point(f"prefill, {short(tokens)}", partial(read, tokens, device, "prefill"))
    yield Point("a past", partial(read_a_past, device))
    if device.type == "cuda":  # last, since the models keep these kernels
        for tokens in prompt_lengths(device):
            name = "prefill with Liger"
            yield Point(f"{name}, {short(tokens)}", partial(read_fused, tokens, device, name))


def read_fused(tokens: int, device: torch.device, name: str) -> list[Row]:
    both = models(device)
    for model in (both.dense, both.hybrid):  # Liger's own gain is none of the windows
        install_kernels(model, "liger")
    return read(tokens, device, name, sides=(DENSE, STATIC), computed=COMPUTED_FUSED)


def read(
    tokens: int,
    device: torch.device,
    name: str,
    sides: Sequence[Side] = SIDES,
    computed: float = COMPUTED,
) -> list[Row]:
    both = models(device)
    pieces = both.ids(tokens).split(both.chunk, dim=1)

    ready: dict[str, Any] = {}

    def set_up(name: str) -> None:  # 1 to 2 ms of a hybrid (on a CPU), which are not reading
        ready[name] = both.of(next(side for side in sides if side.name == name))

    def read_all(name: str) -> None:
        list(run_steps(ready[name], pieces, DynamicCache(config=ready[name].config)))

    timed = {side.name: partial(read_all, side.name) for side in sides}
    seconds = time_in_turns(timed, 3, device, set_up)
    speeds = {side: tokens / median(seconds[side.name]) for side in sides}
    free_memory()
    rows: list[Row] = [
        {
            "name": f"{name}, {short(tokens)}, {side.name}",
            "what": f"{name}, {side.name}",
            "tokens": tokens,
            "value": speed,
            "unit": "tokens/s",
            "dense": None if side is DENSE else speeds[DENSE],
        }
        for side, speed in speeds.items()
    ]
    # The computed speed is that of this length.
    if tokens == 8 * K:
        rows = [row | {"computed": computed} for row in rows if row["dense"]] + rows[:1]
    return rows


def read_a_past(device: torch.device) -> list[Row]:
    """One layer's full attention of a chunk behind a past: as we compute it (where torch prefers
    cuDNN, in two calls of it that are merged), and as torch does, in one call."""
    on_gpu = device.type == "cuda"
    new, past, dtype = (8 * K, 56 * K, torch.bfloat16) if on_gpu else (64, 448, torch.float32)
    heads, groups, size = 16, 8, 128
    shapes = ((heads, new), (groups, past + new), (groups, past + new))
    q, k, v = (torch.randn(1, *shape, size, device=device, dtype=dtype) for shape in shapes)
    call = AttentionCall(q, k, v, scaling=size**-0.5)
    sides = {"ours": lambda: attend(call), "torch": lambda: by_torch(call)}
    with torch.inference_mode():
        seconds = time_in_turns(sides, 3, device)
        error = float((attend(call) - by_torch(call)).float().abs().max())
        by_cudnn = on_gpu and prefers_cudnn(q, k[:, :, :past], v[:, :, :past], call.scaling)
    # Each new query sees the whole past and, of the new keys, half on average.
    pairs = new * past + new * (new + 1) / 2
    flops = 4 * heads * size * pairs
    return [
        {
            "name": f"a chunk of {short(new)} behind {short(past)} by {name}",
            "value": flops / median(found) / 1e12,
            "unit": "TFLOP/s",
            "computed": COMPUTED_TFLOPS if name == "ours" else None,
            "by_cudnn": by_cudnn if name == "ours" else False,
            "largest_difference": error,
        }
        for name, found in seconds.items()
    ]


def by_torch(call: AttentionCall) -> Tensor:
    q, k, v = call.q_BHTD, call.k_BGSD, call.v_BGSD
    bias = causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, bias, scale=call.scaling, enable_gqa=True)


def conclude(rows: Sequence[Row]) -> list[str]:
    found = faster_from(rows)
    for row in rows:
        if "by_cudnn" in row and row["name"].endswith("ours"):
            how = "two calls of cuDNN" if row["by_cudnn"] else "no cuDNN"
            difference = f"{row['largest_difference']:.2g}"
            found.append(f"{row['name']}: {how}; largest difference from torch {difference}")
    return found
