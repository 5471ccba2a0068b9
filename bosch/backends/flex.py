"""`torch.nn.attention.flex_attention`: compiled for each pattern, skips blocks that a window hides.

The first call takes 7 to 40 seconds to compile. It has gradients on CUDA only.
"""
# B batch, H query heads, T queries, S keys, D head size

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from bosch.backends._graphs import allow_graphs
from bosch.backends._interface import NO_MASK, AttentionCall, Documents


def unavailable() -> str | None:
    return None


def supports(call: AttentionCall) -> str | None:
    if call.dropout:
        return "it has no dropout"
    if call.mask_BNTS is not None:
        return NO_MASK
    if call.q_BHTD.device.type not in ("cuda", "cpu"):
        return "it compiles for CUDA and for the CPU only"
    if call.needs_grad and call.q_BHTD.device.type != "cuda":
        return "it has gradients on CUDA only"
    if call.q_BHTD.dtype == torch.float64:
        return "it does not compute in float64"
    if torch.compiler.is_compiling():
        return "inside a compiled model it would be compiled twice"
    return None


def priority(call: AttentionCall) -> int | None:
    # In float32, which no flash kernel computes, it would compile for each length of a prompt.
    is_half = call.q_BHTD.dtype in (torch.float16, torch.bfloat16)
    is_meant = call.q_BHTD.device.type == "cuda" and is_half and not call.is_plain_full
    return 1 if is_meant else None


def attend(call: AttentionCall) -> Tensor:
    (batch, _, num_queries, _), num_keys = call.q_BHTD.shape, call.k_BGSD.shape[2]
    if call.documents is None:
        mask = _band_mask(num_queries, num_keys, call.window_tokens, call.q_BHTD.device)
    else:
        mask = _documents_mask(call.documents, batch, num_queries, call.window_tokens)
    out = _compiled()(
        call.q_BHTD,
        call.k_BGSD,
        call.v_BGSD,
        block_mask=mask,
        scale=call.scaling,
        enable_gqa=call.is_grouped,
    )
    assert isinstance(out, Tensor)
    return out


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., object]:
    allow_graphs(1024)  # one for each number of heads, length and mask; uncompiled it makes T x S
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=4)  # shared by the layers
def _documents_mask(
    documents: Documents, batch: int, num_tokens: int, window_tokens: int | None
) -> BlockMask:
    with torch.inference_mode(False):
        index_BT, see = documents.index_BT(), _sees(0, window_tokens)

        def see_own_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return see(b, h, q, k) & (index_BT[b, q] == index_BT[b, k])

        device = documents.device
        return create_block_mask(
            see_own_document, batch, None, num_tokens, num_tokens, device=device
        )


@lru_cache(maxsize=64)
def _band_mask(
    num_queries: int, num_keys: int, window_tokens: int | None, device: torch.device
) -> BlockMask:
    with torch.inference_mode(False):  # one made in evaluation is used in training too
        see = _sees(num_keys - num_queries, window_tokens)
        return create_block_mask(see, None, None, num_queries, num_keys, device=device)


def _sees(
    past: int, window_tokens: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The visibility rule as a function for flex: query q is at key `q + past`."""

    def see(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        causal = k <= q + past
        # In this order only bool tensors get as large as T x S while the block mask is made.
        return causal if window_tokens is None else causal & (k > q + (past - window_tokens))

    return see
