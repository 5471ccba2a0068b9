"""The static cache: how fast a token is as one graph, and whether its logits are those of the
rolling cache. The graph is captured from the operators as they are, and of the compiled model,
whose kernels are fewer."""
# B batch, T tokens, V vocabulary

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
STEPS, WARM = 64, 3  # tokens that are read one by one; steps before a graph is captured
CLOSE = 0.05  # of the largest logit: both sides round to bf16
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
        # The dynamic cache decides what is right: it is tested against the reference.
        rolling, _, _ = decode(both, side, tokens, None)
        static, speed, compiled = decode(both, side, tokens, how)
        free_memory()
        difference = float((static - rolling).abs().max() / rolling.abs().max())
        wrong = f"logits differ from the rolling cache's by {difference:.2g} of the largest"
        rows.append(
            {
                "name": f"{name}, {side.name}",
                "what": f"decoding in a {how}, {side.name}",
                "tokens": tokens,
                "value": speed,
                "unit": "tokens/s",
                "dense": None if side is DENSE else rows[0]["value"],
                "computed": COMPUTED[how] if tokens == 8 * K else None,
                "difference": difference,
                "compiled_graphs": compiled,
                **({} if difference <= CLOSE else {"failed": wrong}),  # also NaN
            }
        )
    return rows


@torch.inference_mode()
def decode(both: Models, side: Side, tokens: int, how: str | None) -> tuple[Tensor, float, int]:
    """The logits after each of some tokens that follow a prompt, how many tokens a second, and how
    many graphs were compiled. `how`: None for the dynamic cache. On a GPU the steps over a static
    cache are one CUDA graph, which is captured once."""
    model: Any = both.of(side)
    filled: Any = DynamicCache(config=model.config)
    if how is not None:
        filled = StaticCache(config=model.config, max_cache_len=tokens + STEPS)
    for piece in both.ids(tokens).split(both.chunk, dim=1):
        logits_B1V = next_logits(model, piece, filled)
    call = next_logits
    if how == "compiled graph":
        torch.compiler.reset()
        counters.clear()
        # A rehearsal compiles into the operators as they are, which takes no minute.
        backend = "inductor" if both.device.type == "cuda" else "eager"
        call = torch.compile(next_logits, fullgraph=True, dynamic=False, backend=backend)

    # The same varied tokens for both caches: what a model writes itself, after one near tie, is
    # another text.
    following_BT = both.ids(tokens + STEPS)[:, tokens:]
    token_B1 = following_BT[:, :1].clone()

    def step() -> None:  # in place: a graph reads and writes the same memory each time
        logits_B1V.copy_(call(model, token_B1, filled))

    found, seconds, run = list[Tensor](), list[float](), step
    for number in range(STEPS):
        token_B1.copy_(following_BT[:, number : number + 1])
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
        found.append(logits_B1V.float().cpu())
    compiled = counters["stats"]["unique_graphs"] if how == "compiled graph" else 0
    return torch.cat(found, dim=1), 1 / median(seconds[WARM:]), compiled


def next_logits(model: Any, ids_BT: Tensor, filled: Any) -> Tensor:
    logits_B1V: Tensor = model(ids_BT, use_cache=True, **{CACHE: filled}, logits_to_keep=1).logits
    return logits_B1V


def conclude(rows: Sequence[Row]) -> list[str]:
    compared = [
        f"{row['name']}: logits differ from the rolling cache's by {row['difference']:.2g} of the "
        "largest"
        + (f"; graphs compiled: {row['compiled_graphs']}" if row["compiled_graphs"] else "")
        for row in rows
    ]
    return faster_from(rows) + compared
