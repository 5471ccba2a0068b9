"""Whether cuDNN's plans for each new length are what makes a token slow."""
# B batch, H query heads, G kv heads, T queries, S keys, D head size

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._measure import Row, now
from benchmarks.experiments._points import K, Point, Points
from bosch.attention.call import AttentionCall
from bosch.attention.dispatch import attend

MINUTES = 0.5
LENGTHS = 32  # new ones, each asked once
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def points(device: torch.device) -> Points:
    for num_queries in (1, 4000 if device.type == "cuda" else 40):
        what = "one query" if num_queries == 1 else f"{num_queries:,} queries and more"
        for name, attention in (
            ("cuDNN on", partial(by_torch, is_allowed=True)),
            ("cuDNN off", partial(by_torch, is_allowed=False)),
            ("ours", ours),
        ):
            measure = partial(compare_lengths, f"{what}, {name}", num_queries, attention, device)
            yield Point(f"{what}, {name}", measure)


def compare_lengths(
    name: str, num_queries: int, attention: Attention, device: torch.device
) -> list[Row]:
    on_gpu = device.type == "cuda"
    first = (8 * K if on_gpu else 128) if num_queries == 1 else num_queries
    count = LENGTHS if num_queries == 1 else 10
    lengths = range(first, first + count)

    def seconds(lengths: Sequence[int]) -> float:
        inputs = [make_inputs(num_queries, length, device) for length in lengths]
        begin = now(device)
        for tensors in inputs:
            attention(*tensors)
        return (now(device) - begin) / len(lengths)

    with torch.inference_mode():
        seconds([first + count])  # loads the kernels
        new = seconds(lengths)
        # If plans were made for each length, the calls at one repeated length would be faster.
        repeated = seconds([first + count] * count)
    return [
        {
            "name": name,
            "value": 1 / new,
            "unit": "calls/s at new lengths",
            "repeated": 1 / repeated,
            "new_ms": 1e3 * new,
            "repeated_ms": 1e3 * repeated,
        }
    ]


def make_inputs(num_queries: int, length: int, device: torch.device) -> tuple[Tensor, ...]:
    num_queries = length if num_queries > 1 else 1
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = (16, num_queries), (8, length), (8, length)  # heads of Qwen3-1.7B
    return tuple(torch.randn(1, *shape, 128, device=device, dtype=dtype) for shape in shapes)


def by_torch(q: Tensor, k: Tensor, v: Tensor, is_allowed: bool) -> Tensor:
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(is_allowed)
    try:
        is_causal = q.shape[2] > 1
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    finally:
        cuda.enable_cudnn_sdp(before)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(AttentionCall(q, k, v, scaling=q.shape[-1] ** -0.5))


def conclude(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row['name']}: a call at a new length takes {row['new_ms']:.2f} ms, at a repeated one "
        f"{row['repeated_ms']:.2f}"
        for row in rows
    ]
