"""The flash attention of torch's core, `varlen_attn` (torch >= 2.11, CUDA)."""
# B batch, H query heads, T queries, D head size, N tokens of all rows

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
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
    if counts_seen(call):
        call = replace(call, mask_BNTS=None)  # which says no more than the number
    return "it has no dropout" if call.dropout else flash_refusal(call)


def counts_seen(call: AttentionCall) -> bool:
    """Whether the kernel can be told how many slots of a static cache count. It has no gradient."""
    is_over_slots = call.num_seen is not None and call.sink is None
    return is_over_slots and not call.needs_grad and counts_keys()


@torch.compiler.assume_constant_result
def counts_keys() -> bool:
    """Whether it can be told how many keys of each text count (torch 2.13 can)."""
    from torch.nn.attention import varlen

    return "seqused_k" in inspect.signature(varlen.varlen_attn).parameters


def priority(call: AttentionCall) -> int | None:
    # 2: after flash, whose version 3 is faster, and before sdpa, whose windows are blocks with
    # masks. Not for plain full attention: that is torch's own choice. But for a token over the
    # slots of a static cache: of those it reads only the filled ones, in parallel, and no mask.
    if call.q_BHTD.device.type != "cuda":
        return None
    return 2 if counts_seen(call) or not call.is_plain_full else None


def attend(call: AttentionCall) -> Tensor:
    from torch.nn.attention import varlen

    if call.num_seen is not None and counts_seen(call):
        return _over_slots(call, call.num_seen)
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


def _over_slots(call: AttentionCall, num_seen: Tensor) -> Tensor:
    """A single token of each row. Each group of each row is a text of one query with several heads
    and one KV head, so that keys are read where they are: rows and groups come first in memory."""
    from torch.nn.attention import varlen

    (batch, num_groups, num_slots, size), num_heads = call.k_BGSD.shape, call.q_BHTD.shape[1]
    texts = torch.arange(batch * num_groups + 1, dtype=torch.int32, device=call.q_BHTD.device)
    out_NRD: Any = varlen.varlen_attn(
        call.q_BHTD.reshape(batch * num_groups, num_heads // num_groups, size),
        call.k_BGSD.reshape(-1, 1, size),
        call.v_BGSD.reshape(-1, 1, size),
        texts,
        texts * num_slots,
        1,
        num_slots,
        scale=call.scaling,
        enable_gqa=num_heads != num_groups,
        seqused_k=num_seen.to(torch.int32).expand(batch * num_groups).contiguous(),
    )
    result: Tensor = out_NRD.reshape(call.q_BHTD.shape)
    return result


backward_kernel: Callable[..., tuple[Tensor, Tensor, Tensor]]
backward_kernel = torch.ops.aten._flash_attention_backward
