"""The kernels of flash-attn, without a GPU: what the packages check of a call, and the output by
the reference attention. tests/stand_ins has packages with the names and signatures of the real
ones, made from this; tests/pretended_gpu.py is a machine on which they can be called.
"""
# N query tokens and M key tokens of all sequences together, H query heads, G kv heads, D head size

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bosch.attention.backends import reference
from bosch.attention.call import AttentionCall, repeat_groups


class KernelError(RuntimeError):
    """What the real kernel would refuse, or would compute from the wrong memory."""


def compute(
    q_NHD: Tensor,
    k_MGD: Tensor,
    v_MGD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, (H, N). Query i of a sequence with T queries and S keys sees the keys
    from i + S - T - left to i + S - T + right; a side of -1 is open. As flash_attn_varlen_func's
    docstring has it."""
    check(q_NHD, k_MGD, v_MGD)
    check_lengths("q", q_NHD, cu_seqlens_q, max_seqlen_q)
    check_lengths("k", k_MGD, cu_seqlens_k, max_seqlen_k)
    demand(len(cu_seqlens_q) == len(cu_seqlens_k), "as many sequences of queries as of keys")
    demand(type(window_size) is tuple and len(window_size) == 2, "window_size is a pair")
    demand(all(type(side) is int and side >= -1 for side in window_size), "window_size is of ints")
    left, right = window_size[0], 0 if causal else window_size[1]
    scale = q_NHD.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    outs, lses = [], []
    for queries, keys in zip(spans(cu_seqlens_q), spans(cu_seqlens_k), strict=True):
        q_HTD, k_GSD, v_GSD = (
            x[span].transpose(0, 1) for x, span in ((q_NHD, queries), (k_MGD, keys), (v_MGD, keys))
        )
        visible_TS = seen(q_HTD.shape[1], k_GSD.shape[1], left, right)
        call = AttentionCall(
            q_HTD[None], k_GSD[None], v_GSD[None], scale, mask_BNTS=visible_TS[None, None]
        )
        outs.append(reference.attend(call)[0].transpose(0, 1))
        scores_HTS = call.q_BHTD[0].float() @ repeat_groups(call.k_BGSD, len(q_HTD))[0].float().mT
        lses.append((scores_HTS * scale).masked_fill(~visible_TS, -torch.inf).logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


def seen(num_queries: int, num_keys: int, left: int, right: int) -> Tensor:
    lag_TS = torch.arange(num_keys) - torch.arange(num_queries)[:, None] - (num_keys - num_queries)
    first, last = (-left if left >= 0 else -num_keys), (right if right >= 0 else num_keys)
    return (lag_TS >= first) & (lag_TS <= last)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HN: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int, dropout: float,
    is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float,
    window_size_left: int, window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As the kernel does it: probabilities from the log-sum-exp that it is given, and the sum that
    is subtracted from the output that it is given."""
    demand(not dropout and not is_causal and lse_HN.dtype == torch.float32, "what we ask for")
    demand(lse_HN.is_contiguous() and lse_HN.shape == (q.shape[1], len(q)), "lse is (H, N)")
    check(q, k, v)
    grads: list[list[Tensor]] = [[], [], []]
    num_heads, num_groups = q.shape[1], k.shape[1]
    for queries, keys in zip(spans(cu_seqlens_q), spans(cu_seqlens_k), strict=True):
        q_HTD, grad_HTD, out_HTD = (x[queries].transpose(0, 1).float() for x in (q, grad, out))
        k_HSD, v_HSD = (
            repeat_groups(x[keys].transpose(0, 1)[None].float(), num_heads)[0] for x in (k, v)
        )
        seen_TS = seen(q_HTD.shape[1], k_HSD.shape[1], window_size_left, window_size_right)
        scores_HTS = (q_HTD @ k_HSD.mT * scale).masked_fill(~seen_TS, -torch.inf)
        p_HTS = (scores_HTS - lse_HN[:, queries, None]).exp()
        ds_HTS = p_HTS * (grad_HTD @ v_HSD.mT - (grad_HTD * out_HTD).sum(-1, keepdim=True)) * scale
        dk_GSD, dv_GSD = (
            x_HSD.unflatten(0, (num_groups, -1)).sum(1)
            for x_HSD in (ds_HTS.mT @ q_HTD, p_HTS.mT @ grad_HTD)
        )
        for each, x in zip(grads, (ds_HTS @ k_HSD, dk_GSD, dv_GSD), strict=True):
            each.append(x.transpose(0, 1).to(q.dtype))
    dq, dk, dv = map(torch.cat, grads)
    return dq, dk, dv


def check(q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor) -> None:
    """The checks of `mha_varlen_fwd` in flash-attn's csrc/flash_attn/flash_api.cpp, and of
    hopper/flash_api.cpp where they are stricter (head sizes)."""
    tensors = (q_NHD, k_MGD, v_MGD)
    demand(q_NHD.dtype in (torch.float16, torch.bfloat16), "only fp16 and bf16")
    demand(all(x.dtype == q_NHD.dtype for x in tensors), "query, key and value have one dtype")
    # The packages' Python copies such a tensor in silence; torch's varlen_attn refuses it.
    demand(all(x.stride(-1) == 1 for x in tensors), "contiguous last dimension")
    demand(all(x.dim() == 3 for x in tensors), "(tokens, heads, head size)")
    head_size = q_NHD.shape[2]
    demand(head_size <= 256 and head_size % 8 == 0, "head size up to 256, a multiple of 8")
    demand(k_MGD.shape == v_MGD.shape and k_MGD.shape[2] == head_size, "shapes of key and value")
    demand(q_NHD.shape[1] % k_MGD.shape[1] == 0, "kv heads divide query heads")


def check_lengths(name: str, x_NHD: Tensor, cu_seqlens: Tensor, longest: int) -> None:
    """The kernel does not check the last two: it reads other memory, or leaves tokens out."""
    demand(cu_seqlens.dtype == torch.int32, f"cu_seqlens_{name} must have dtype int32")
    demand(cu_seqlens.dim() == 1 and cu_seqlens.is_contiguous(), f"contiguous cu_seqlens_{name}")
    demand(len(cu_seqlens) > 1, "batch size must be positive")
    demand(type(longest) is int, f"max_seqlen_{name} is an int")
    ends = [int(cu_seqlens[0]), int(cu_seqlens[-1])]
    demand(ends == [0, len(x_NHD)], f"cu_seqlens_{name} cover all tokens")
    lengths = cu_seqlens.diff()
    demand(int(lengths.min()) > 0, f"cu_seqlens_{name} grow")
    demand(int(lengths.max()) == longest, f"max_seqlen_{name} is the longest sequence")


def demand(is_right: bool, what: str) -> None:
    if not is_right:
        raise KernelError(what)


def spans(cu_seqlens: Tensor) -> Iterator[slice]:
    return (slice(a, b) for a, b in pairwise(cu_seqlens.tolist()))


def varlen_attn_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
    max_k: int, *, return_aux: Any = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """torch's, of version 2.11, which shares KV heads by itself."""
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
    out, lse = compute(query, key, value, *lengths, scale, False, window_size)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
    max_k: int, *, window_size: Any = (-1, -1), enable_gqa: bool = False,
    seqused_k: Tensor | None = None, **named: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """torch's, of version 2.13. `seqused_k`: how many keys of each sequence count."""
    demand(enable_gqa or query.size(1) == key.size(1), "enable_gqa, as heads are grouped")
    if seqused_k is not None:
        demand(seqused_k.dtype == torch.int32 and seqused_k.is_contiguous(), "seqused_k: int32")
        demand(len(seqused_k) == len(cu_seq_k) - 1, "seqused_k for each sequence")
        check_lengths("k", key, cu_seq_k, max_k)
        pairs = list(zip(spans(cu_seq_k), seqused_k.tolist(), strict=True))
        demand(all(0 < n <= span.stop - span.start for span, n in pairs), "seqused_k in bounds")
        key, value = (torch.cat([x[span][:n] for span, n in pairs]) for x in (key, value))
        cu_seq_k = torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)).to(torch.int32)
        max_k = int(seqused_k.max())
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
    return varlen_attn_2_11(query, key, value, *lengths, window_size=window_size, **named)
