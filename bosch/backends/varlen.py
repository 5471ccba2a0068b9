"""The flash attention of torch's core, `varlen_attn` (torch >= 2.11, CUDA)."""
# B batch, H query heads, T queries, D head size

import inspect
from collections.abc import Callable

from torch import Tensor

from bosch.backends._interface import (
    AttentionCall,
    cumulative_lengths,
    flash_refusal,
    flat_tokens,
    no_flash_device,
    window_size,
)


def unavailable() -> str | None:
    if reason := no_flash_device():
        return reason
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "this torch has no torch.nn.attention.varlen"
    if "window_size" not in inspect.signature(varlen_attn).parameters:
        return "the varlen_attn of this torch has no window_size (torch 2.11 brings it)"
    return None


def supports(call: AttentionCall) -> str | None:
    return "it has no dropout" if call.dropout else flash_refusal(call)


def priority(call: AttentionCall) -> int | None:
    return 2 if call.q_BHTD.device.type == "cuda" and not call.is_plain_full else None


def attend(call: AttentionCall) -> Tensor:
    from torch.nn.attention import varlen

    varlen_attn: Callable[..., Tensor | tuple[Tensor, Tensor]] = varlen.varlen_attn
    optional: dict[str, bool] = {}
    # torch 2.11 shares KV heads by itself; later versions need the argument.
    if call.is_grouped and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        optional["enable_gqa"] = True
    out = varlen_attn(
        *(flat_tokens(x) for x in (call.q_BHTD, call.k_BGSD, call.v_BGSD)),
        *cumulative_lengths(call).values(),
        scale=call.scaling,
        window_size=window_size(call.window_tokens),
        **optional,
    )
    assert isinstance(out, Tensor)
    return out.unflatten(0, (call.q_BHTD.shape[0], -1)).transpose(1, 2)
