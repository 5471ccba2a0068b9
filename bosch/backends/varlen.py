"""The flash attention of torch's core, `varlen_attn` (torch >= 2.11, CUDA)."""
# B batch, H query heads, T queries, D head size, N tokens of all rows

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bosch.backends._interface import (
    AttentionCall,
    cumulative_lengths,
    flash_refusal,
    flat_tokens,
    in_rows,
    no_flash_device,
    window_size,
)
from bosch.backends._sink import attend_with_sink


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
    optional: dict[str, Any] = {}
    # torch 2.11 shares KV heads by itself; later versions need the argument.
    if call.is_grouped and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        optional["enable_gqa"] = True
    kernel = partial(
        varlen_attn, scale=call.scaling, window_size=window_size(call.window_tokens), **optional
    )
    if call.sink is not None:
        tensors = call.q_BHTD, call.k_BGSD, call.v_BGSD
        return attend_with_sink(VarlenKernel(call, kernel), *tensors, call.sink, call.scaling)
    out = kernel(
        *(flat_tokens(x) for x in (call.q_BHTD, call.k_BGSD, call.v_BGSD)),
        *cumulative_lengths(call).values(),
    )
    assert isinstance(out, Tensor)
    return out.unflatten(0, (call.q_BHTD.shape[0], -1)).transpose(1, 2)


@dataclass(frozen=True)
class VarlenKernel:
    """With its log-sum-exp, and its backward handed another output and another one."""

    call: AttentionCall
    kernel: Callable[..., Tensor | tuple[Tensor, Tensor]]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.varlen import AuxRequest

        lengths = cumulative_lengths(self.call).values()
        flat = map(flat_tokens, (q, k, v))
        out_NHD, lse_HN = self.kernel(*flat, *lengths, return_aux=AuxRequest(lse=True))
        return in_rows(out_NHD, lse_HN, len(q))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        left, right = window_size(self.call.window_tokens)
        grads = backward_kernel(
            *(flat_tokens(x) for x in (grad, q, k, v, out)),
            lse.transpose(0, 1).flatten(1).contiguous(),
            *cumulative_lengths(self.call).values(),
            0.0,  # dropout
            False,  # causal: the window says it
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, device=q.device),
            scale=self.call.scaling,
            window_size_left=left,
            window_size_right=right,
        )
        dq, dk, dv = (x_NHD.unflatten(0, (len(q), -1)).transpose(1, 2) for x_NHD in grads)
        return dq, dk, dv


backward_kernel: Callable[..., tuple[Tensor, Tensor, Tensor]]
backward_kernel = torch.ops.aten._flash_attention_backward
