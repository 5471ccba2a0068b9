"""torch's FlexAttention: a kernel that the compiler makes for what is visible, and that leaves out
blocks of which nothing is.

On GPUs it is compiled once for each kind of call (half a minute), on CPUs computed plainly, which
is for tests: there torch has no gradients of it. `auto` takes it only where rates.py says that it
was measured to be the fastest.
"""
# B batch, H query heads, G kv heads, T queries, S keys, D head size, I blocks of queries, J blocks
# of keys, N keys of the sink

import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bosch.attention.call import AttentionCall
from bosch.attention.graphs import allow_graphs
from bosch.attention.merge import merge_differentiably

BLOCK = 128  # queries and keys
# Of fewer queries than a block torch would take a kernel for decoding, which it cannot make of
# grouped heads: "no choices exist" (2.13).
SHORT = {"FORCE_USE_FLEX_ATTENTION": True}


def unavailable() -> str | None:
    try:
        from torch.nn.attention.flex_attention import AuxRequest  # noqa: F401
    except ImportError:
        return "the FlexAttention of this torch gives no log-sum-exp in the way that is needed"
    return None


def supports(call: AttentionCall) -> str | None:
    if call.dropout:
        return "it has no dropout"
    if call.mask_BNTS is not None and call.mask_BNTS.shape[1] > 1:
        return "it takes one mask for all heads"
    if call.needs_grad and not has_gradients(call.q_BHTD.device):
        return "torch has its gradients on GPUs only"
    if call.q_BHTD.device.type != "cpu" and call.q_BHTD.dtype == torch.float64:
        return "its kernels for GPUs have no float64"
    return None


def has_gradients(device: torch.device) -> bool:
    return device.type != "cpu"


def priority(call: AttentionCall) -> int | None:
    # After sdpa, which computes every call: nobody has measured it on this device. Where it was
    # measured, that decides.
    on_gpu, many = call.q_BHTD.device.type == "cuda", call.q_BHTD.shape[2] > 1
    return -1 if on_gpu and many and call.window_tokens is not None else None


def attend(call: AttentionCall) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest

    is_short = call.q_BHTD.device.type != "cpu" and call.q_BHTD.shape[2] < BLOCK
    out_BHTD, aux = _kernel(call.q_BHTD.device.type)(
        call.q_BHTD,
        call.k_BGSD,
        call.v_BGSD,
        block_mask=block_mask(call),
        scale=call.scaling,
        enable_gqa=call.q_BHTD.shape[1] != call.k_BGSD.shape[1],
        return_aux=AuxRequest(lse=True),
        kernel_options=SHORT if is_short else None,
    )
    if call.sink is not None:
        out_BHTD = merge_differentiably(call, out_BHTD, aux.lse)
    result: Tensor = out_BHTD
    return result


@cache
def _kernel(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if device_type != "cpu":
        # A graph for each number of groups, with and without gradients or documents, and at first
        # for each length. Uncompiled it computes all scores, in float32.
        allow_graphs(256)
        return torch.compile(flex_attention)
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return flex_attention


def block_mask(call: AttentionCall) -> Any:
    """Which blocks of queries and keys the kernel visits, and what it sees of those that are
    visible in part. By their borders: torch's own way looks at all T * S pairs."""
    from torch.nn.attention.flex_attention import BlockMask

    num_queries, num_keys = call.q_BHTD.shape[2], call.k_BGSD.shape[2]
    past, device, window_tokens = num_keys - num_queries, call.q_BHTD.device, call.window_tokens
    window = num_keys if window_tokens is None else window_tokens
    index_BT, mask_BNTS = None, call.mask_BNTS
    if mask_BNTS is not None:  # one for all rows, as of a static cache: the kernel asks for each
        mask_BNTS = mask_BNTS.expand(len(call.q_BHTD), -1, -1, -1)
    if call.documents is not None:
        index_BT = call.documents.index_BT().to(torch.int32)

    def is_visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        lag = query + past - key
        visible = lag < window
        # A mask replaces the causal rule.
        visible = visible & (mask_BNTS[b, 0, query, key] if mask_BNTS is not None else lag >= 0)
        if index_BT is not None:
            visible = visible & (index_BT[b, query] == index_BT[b, key])
        return visible

    # The first and the last position of each block. (The last block may be cut short, and then
    # counts as visible in part, as in torch's own masks.)
    first_I1, last_I1 = (x[:, None] + past for x in _borders(num_queries, device))
    first_J, last_J = _borders(num_keys, device)
    is_whole_IJ = (last_I1 - first_I1 == BLOCK - 1) & (last_J - first_J == BLOCK - 1)
    some_BIJ = (last_J > first_I1 - window)[None]
    all_BIJ = (is_whole_IJ & (first_J > last_I1 - window))[None]
    if mask_BNTS is None:
        some_BIJ, all_BIJ = some_BIJ & (first_J <= last_I1), all_BIJ & (last_J <= first_I1)
    else:
        some_BIJ = some_BIJ & _any_of_blocks(mask_BNTS[:, 0])
        all_BIJ = all_BIJ & ~_any_of_blocks(~mask_BNTS[:, 0])
    if index_BT is not None:
        begins_BI1, ends_BI1 = (index_BT[:, x - past] for x in (first_I1, last_I1))
        begins_B1J, ends_B1J = (index_BT[:, None, x] for x in (first_J, last_J))
        some_BIJ = some_BIJ & (begins_B1J <= ends_BI1) & (ends_B1J >= begins_BI1)
        all_BIJ = all_BIJ & (begins_B1J == ends_BI1) & (ends_B1J == begins_BI1)
        all_BIJ = all_BIJ & (begins_BI1 == ends_BI1)
    return BlockMask.from_kv_blocks(
        *_listed(some_BIJ & ~all_BIJ),
        *_listed(some_BIJ & all_BIJ),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(num_queries, num_keys),
    )


def _borders(num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first = torch.arange(0, num_tokens, BLOCK, device=device)
    return first, (first + BLOCK - 1).clamp_max(num_tokens - 1)


def _any_of_blocks(mask_BTS: Tensor) -> Tensor:
    rows, columns = (-n % BLOCK for n in mask_BTS.shape[1:])
    padded = F.pad(mask_BTS, (0, columns, 0, rows))
    return padded.unflatten(2, (-1, BLOCK)).any(3).unflatten(1, (-1, BLOCK)).any(2)


def _listed(chosen_BIJ: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and all blocks, these first: (B, 1, I) and
    (B, 1, I, J), as the kernel reads them."""
    order_BIJ = chosen_BIJ.byte().argsort(stable=True, dim=-1, descending=True)
    return chosen_BIJ.sum(-1)[:, None].to(torch.int32), order_BIJ[:, None].to(torch.int32)
