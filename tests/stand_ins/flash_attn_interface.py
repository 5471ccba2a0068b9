"""A stand-in for flash-attn 3: its varlen function's signature, computed on the CPU."""

from typing import Any

from torch import Tensor

from tests.varlen_kernel import compute, demand

RETURNS_LSE = False  # as the first releases do


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    unused = (seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, pack_gqa)
    demand(all(x is None for x in unused) and not softcap, "nothing we do not use")
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = compute(q, k, v, *lengths, softmax_scale, causal, window_size)
    return (out, lse) if RETURNS_LSE or return_attn_probs else out
