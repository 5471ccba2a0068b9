"""Reading a prompt, warm: what windows save, what fused norms save, and a past read by cuDNN."""
# B batch, H query heads, G kv heads, T queries, S keys, D head size

from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import median

import torch
from torch import Tensor
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
from bosch.attention.call import AttentionCall
from bosch.attention.dispatch import attend
from bosch.training.loss import install_kernels

MINUTES = 1.2
SIDES = (DENSE, PLAIN, STATIC)
# Of Qwen3-1.7B, in tokens per second at 8k: as fast as the dense model; and with fused norms.
COMPUTED, COMPUTED_FUSED = 97_000.0, 140_000.0
COMPUTED_TFLOPS = 600.0  # attention to a past by cuDNN
models = cache(Models)
conclude = faster_from


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
    install_kernels(both.hybrid, "liger")
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

    def side_of(side: Side) -> Callable[[], object]:
        def run() -> None:
            model = both.of(side)
            list(run_steps(model, pieces, DynamicCache(config=model.config)))

        return run

    seconds = time_in_turns({side.name: side_of(side) for side in sides}, 3, device)
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
    """One layer's full attention of a chunk behind a past: as we compute it, and as two calls, each
    without a mask, merged by their log-sum-exp."""
    on_gpu = device.type == "cuda"
    new, past, dtype = (8 * K, 56 * K, torch.bfloat16) if on_gpu else (64, 448, torch.float32)
    heads, groups, size = 16, 8, 128
    shapes = ((heads, new), (groups, past + new), (groups, past + new))
    q, k, v = (torch.randn(1, *shape, size, device=device, dtype=dtype) for shape in shapes)
    call = AttentionCall(q, k, v, scaling=size**-0.5)
    sides = {"ours": lambda: attend(call), "cuDNN": lambda: in_two(call, past)}
    with torch.inference_mode():
        seconds = time_in_turns(sides, 3, device)
        error = float((attend(call) - in_two(call, past)).float().abs().max())
    # Each new query sees the whole past and, of the new keys, half on average.
    pairs = new * past + new * (new + 1) / 2
    flops = 4 * heads * size * pairs
    return [
        {
            "name": f"a chunk of {short(new)} behind {short(past)} by {name}",
            "value": flops / median(found) / 1e12,
            "unit": "TFLOP/s",
            "computed": COMPUTED_TFLOPS if name == "cuDNN" else None,
            "largest_difference": error,
        }
        for name, found in seconds.items()
    ]


def in_two(call: AttentionCall, past: int) -> Tensor:
    (past_BHTD, lse_past_BHT), (new_BHTD, lse_new_BHT) = (
        with_lse(call, keys, is_causal)
        for keys, is_causal in ((slice(0, past), False), (slice(past, None), True))
    )
    share_BHT = torch.sigmoid(lse_past_BHT - lse_new_BHT)
    return torch.lerp(new_BHTD, past_BHTD, share_BHT[..., None].to(new_BHTD.dtype))


def with_lse(call: AttentionCall, keys: slice, is_causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = call.q_BHTD, call.k_BGSD[:, :, keys], call.v_BGSD[:, :, keys]
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=call.scaling
        )
        return out, lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, compute_log_sumexp=True, is_causal=is_causal, scale=call.scaling
    )
    return out, lse.reshape(q.shape[:3])  # cuDNN's has a further dimension of 1
