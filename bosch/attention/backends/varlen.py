"""The flash attention of torch's core, `varlen_attn` (torch >= 2.11, CUDA)."""
# B batch, H query heads, T queries, D head size, N tokens of all rows

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bosch.attention.call import (
    AttentionCall,
    cumulative_lengths,
    flash_refusal,
    flat_tokens,
    in_rows,
    no_flash_device,
    window_size,
)
from bosch.attention.merge import attend_with_sink


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
    # 2: after flash, whose version 3 is faster, and before sdpa, whose windows are blocks with
    # masks. Not for plain full attention: that is torch's own choice.
    return 2 if call.q_BHTD.device.type == "cuda" and not call.is_plain_full else None


def attend(call: AttentionCall) -> Tensor:
    from torch.nn.attention import varlen

    kernel: Callable[..., Any] = varlen.varlen_attn
    left, right = window_size(call.window_tokens)
    lengths, num_rows = cumulative_lengths(call), len(call.q_BHTD)
    # torch 2.11 shares KV heads by itself; later versions need the argument.
    is_grouped = call.q_BHTD.shape[1] != call.k_BGSD.shape[1]
    if is_grouped and "enable_gqa" in inspect.signature(kernel).parameters:
        kernel = partial(kernel, enable_gqa=True)

    def run(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, **more: object) -> Any:
        return kernel(
            flat_tokens(q_BHTD),
            flat_tokens(k_BGSD),
            flat_tokens(v_BGSD),
            *lengths,
            scale=call.scaling,
            window_size=(left, right),
            **more,
        )

    def forward(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
        with_lse = varlen.AuxRequest(lse=True)
        out_NHD, lse_HN = run(q_BHTD, k_BGSD, v_BGSD, return_aux=with_lse)
        return in_rows(out_NHD, lse_HN, num_rows)

    def backward(*tensors: Tensor) -> Iterator[Tensor]:
        """Of another output and log-sum-exp than the kernel's own."""
        # The operator and not torch's own gradient: that would take the output which the kernel
        # gave, and here it is the one merged with the sink.
        *others, lse_BHT = tensors
        grads = backward_kernel(
            *map(flat_tokens, others),
            lse_BHT.transpose(0, 1).flatten(1).contiguous(),
            *lengths,
            0.0,  # dropout
            False,  # causal: the window says it
            torch.zeros(2, dtype=torch.uint64, device=lse_BHT.device),
            torch.empty(0, device=lse_BHT.device),
            scale=call.scaling,
            window_size_left=left,
            window_size_right=right,
        )
        return (x_NHD.unflatten(0, (num_rows, -1)).transpose(1, 2) for x_NHD in grads)

    if call.sink is not None:
        return attend_with_sink(call, forward, backward)
    out: Tensor = run(call.q_BHTD, call.k_BGSD, call.v_BGSD)
    return out.unflatten(0, (num_rows, -1)).transpose(1, 2)


backward_kernel: Callable[..., tuple[Tensor, Tensor, Tensor]]
backward_kernel = torch.ops.aten._flash_attention_backward
