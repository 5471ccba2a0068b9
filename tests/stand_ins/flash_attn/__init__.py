"""A stand-in for flash-attn 2.8: its varlen function's signature, computed on the CPU."""

from typing import Any

import torch
from torch import Tensor

from tests.varlen_kernel import compute, demand

__version__ = "2.8.3"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Dropout zeroes the whole output here, so that a test can tell that it arrived."""
    demand(softcap == 0 and alibi_slopes is None and block_table is None, "nothing we do not use")
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = compute(q, k, v, *lengths, softmax_scale, causal, window_size)
    if return_attn_probs:
        return out, lse, None
    return torch.zeros_like(out) if dropout_p else out
