"""The static cache: how fast a token is as one graph, and whether tokens are the same. The graph is
captured from the operators as they are, and of the compiled model, whose kernels are fewer."""
# B batch, T tokens

from collections.abc import Sequence
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache

from benchmarks._measure import Row, now, short
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
from bosch.attention.cache import CACHE

MINUTES = 3.0
SIDES = (DENSE, PLAIN, STATIC)
STEPS, WARM = 64, 3  # tokens that are compared; steps before a graph is captured
# Tokens per second of Qwen3-1.7B at 8k.
COMPUTED = {"graph": 170.0, "compiled graph": 350.0}
models = cache(Models)


def points(device: torch.device) -> Points:
    for tokens in prompt_lengths(device):
        for how in COMPUTED:
            name = f"{how}, {short(tokens)}"
            yield Point(name, partial(compare, name, how, tokens, device))


def compare(name: str, how: str, tokens: int, device: torch.device) -> list[Row]:
    both, rows = models(device), list[Row]()
    for side in SIDES:
        # The dynamic cache decides which tokens are right: it is tested against the reference.
        rolling, _, _ = decode(both, side, tokens, None)
        static, speed, compiled = decode(both, side, tokens, how)
        free_memory()
        same = sum(a == b for a, b in zip(rolling, static, strict=True))
        rows.append(
            {
                "name": f"{name}, {side.name}",
                "what": f"decoding in a {how}, {side.name}",
                "tokens": tokens,
                "value": speed,
                "unit": "tokens/s",
                "dense": None if side is DENSE else rows[0]["value"],
                "computed": COMPUTED[how] if tokens == 8 * K else None,
                "same_tokens": same,
                "of_tokens": STEPS,
                "compiled_graphs": compiled,
            }
        )
    return rows


@torch.inference_mode()
def decode(both: Models, side: Side, tokens: int, how: str | None) -> tuple[list[int], float, int]:
    """Tokens chosen greedily after a prompt, how many a second, and how many graphs were compiled.
    `how`: None for the dynamic cache. On a GPU the steps over a static cache are one CUDA graph,
    which is captured once."""
    model: Any = both.of(side)
    filled: Any = DynamicCache(config=model.config)
    if how is not None:
        filled = StaticCache(config=model.config, max_cache_len=tokens + STEPS)
    for piece in both.ids(tokens).split(both.chunk, dim=1):
        token = likeliest(model, piece, filled)
    call = likeliest
    if how == "compiled graph":
        torch.compiler.reset()
        counters.clear()
        # A rehearsal compiles into the operators as they are, which takes no minute.
        backend = "inductor" if both.device.type == "cuda" else "eager"
        call = torch.compile(likeliest, fullgraph=True, dynamic=False, backend=backend)

    def step() -> None:  # in place: a graph reads and writes the same memory each time
        token.copy_(call(model, token, filled))

    found, run = list[int](), step
    seconds = []
    for number in range(STEPS):
        # The first steps run as usual: kernels are chosen and memory is taken outside the capture,
        # where both would be an error.
        if number == WARM and how is not None and both.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # what is captured does not run
                step()
            run = graph.replay
        begin = now(both.device)
        run()
        seconds.append(now(both.device) - begin)
        found.append(int(token))
    compiled = counters["stats"]["unique_graphs"] if how == "compiled graph" else 0
    return found, 1 / median(seconds[WARM:]), compiled


def likeliest(model: Any, ids_BT: Tensor, filled: Any) -> Tensor:
    logits_BTV = model(ids_BT, use_cache=True, **{CACHE: filled}, logits_to_keep=1).logits
    return logits_BTV[:, -1:].argmax(-1)


def conclude(rows: Sequence[Row]) -> list[str]:
    same = [
        f"{row['name']}: {row['same_tokens']} of {row['of_tokens']} tokens are those of the "
        "rolling cache"
        + (f"; graphs compiled: {row['compiled_graphs']}" if row["compiled_graphs"] else "")
        for row in rows
    ]
    return faster_from(rows) + same
