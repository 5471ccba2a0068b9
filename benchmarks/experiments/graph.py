"""The static cache in a CUDA graph: how fast a token is without launches, and the same tokens."""
# B batch, T tokens

from collections.abc import Sequence
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from benchmarks._measure import Row, now, short
from benchmarks.experiments._points import (
    DENSE,
    PLAIN,
    STATIC,
    Models,
    Point,
    Points,
    Side,
    faster_from,
    free_memory,
    prompt_lengths,
)
from bosch.attention.cache import CACHE

MINUTES = 1.6
SIDES = (DENSE, PLAIN, STATIC)
STEPS, WARM = 64, 3  # tokens that are compared; steps before a graph is captured
COMPUTED = 170.0  # tokens per second of a graph of these operators, Qwen3-1.7B at 8k
models = cache(Models)


def points(device: torch.device) -> Points:
    for tokens in prompt_lengths(device):
        yield Point(f"graph, {short(tokens)}", partial(compare, tokens, device))


def compare(tokens: int, device: torch.device) -> list[Row]:
    both, rows = models(device), list[Row]()
    for side in SIDES:
        # The dynamic cache decides which tokens are right: it is tested against the reference.
        rolling, _ = decode(both, side, tokens, is_static=False)
        static, speed = decode(both, side, tokens, is_static=True)
        free_memory()
        same = sum(a == b for a, b in zip(rolling, static, strict=True))
        rows.append(
            {
                "name": f"graph, {short(tokens)}, {side.name}",
                "what": f"decoding in a graph, {side.name}",
                "tokens": tokens,
                "value": speed,
                "unit": "tokens/s",
                "dense": None if side is DENSE else rows[0]["value"],
                "computed": COMPUTED,
                "same_tokens": same,
                "of_tokens": STEPS,
            }
        )
    return rows


@torch.inference_mode()
def decode(both: Models, side: Side, tokens: int, is_static: bool) -> tuple[list[int], float]:
    """Tokens chosen greedily after a prompt, and how many a second. On a GPU the steps over a
    static cache are one graph, which is captured once."""
    model: Any = both.of(side)
    filled: Any = DynamicCache(config=model.config)
    if is_static:
        filled = StaticCache(config=model.config, max_cache_len=tokens + STEPS)
    for piece in both.ids(tokens).split(both.chunk, dim=1):
        token = likeliest(model, piece, filled)

    def step() -> None:  # in place: a graph reads and writes the same memory each time
        token.copy_(likeliest(model, token, filled))

    found, run = list[int](), step
    seconds = []
    for number in range(STEPS):
        # The first steps run as usual: kernels are chosen and memory is taken outside the capture,
        # where both would be an error.
        if number == WARM and is_static and both.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # what is captured does not run
                step()
            run = graph.replay
        begin = now(both.device)
        run()
        seconds.append(now(both.device) - begin)
        found.append(int(token))
    return found, 1 / median(seconds[WARM:])


def likeliest(model: Any, ids_BT: Tensor, filled: Any) -> Tensor:
    logits_BTV = model(ids_BT, use_cache=True, **{CACHE: filled}, logits_to_keep=1).logits
    return logits_BTV[:, -1:].argmax(-1)


def conclude(rows: Sequence[Row]) -> list[str]:
    same = [
        f"{row['name']}: {row['same_tokens']} of {row['of_tokens']} tokens are those of the "
        "rolling cache"
        for row in rows
    ]
    return faster_from(rows) + same
