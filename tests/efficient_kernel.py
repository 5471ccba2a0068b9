"""torch's memory-efficient attention without a GPU: what its two operators for CUDA check of a call
or take for granted, and the output in a few lines. tests/pretended_gpu.py puts it in their place.
"""
# B batch, H heads, T queries, S keys, D head size, P queries with padding

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.varlen_kernel import demand


def forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    check(query, key, value, attn_bias, dropout_p)
    demand(compute_log_sumexp, "the log-sum-exp is asked for")
    scores_BHTS = scores(query, key, attn_bias, is_causal, scale)
    out_BHTD = (scores_BHTS.softmax(-1) @ value.float()).to(query.dtype)
    lse_BHT = scores_BHTS.logsumexp(-1)
    lse_BHP = F.pad(lse_BHT, (0, -lse_BHT.shape[-1] % 32), value=torch.inf)
    number = torch.zeros((), dtype=torch.long)
    return out_BHTD.transpose(1, 2).contiguous().transpose(1, 2), lse_BHP, number, number


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None,
    out: Tensor, logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor, dropout_p: float,
    grad_input_mask: list[bool], is_causal: bool = False, *, scale: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """As the kernel does it: probabilities from the log-sum-exp that it is given, and the sum that
    is subtracted from the output that it is given."""
    check(query, key, value, attn_bias, dropout_p)
    num_queries = query.shape[2]
    demand(grad_input_mask == [True, True, True, False], "no gradient of the bias")
    demand(philox_seed.dtype == philox_offset.dtype == torch.long, "a random state")
    demand(grad_out.dtype == out.dtype == query.dtype, "one dtype")
    demand(logsumexp.dtype == torch.float32 and logsumexp.is_contiguous(), "lse in float32")
    padded = num_queries + -num_queries % 32
    demand(logsumexp.shape == (*query.shape[:2], padded), "lse of a multiple of 32 queries")
    # Rows that do not exist take part in the kernel, with zeros for their queries.
    demand(bool((logsumexp[..., num_queries:] == torch.inf).all()), "lse is infinite beyond")
    demand(out.transpose(1, 2).is_contiguous(), "out is (B, T, H, D) in memory")
    scores_BHTS = scores(query, key, attn_bias, is_causal, scale)
    p_BHTS = (scores_BHTS - logsumexp[..., :num_queries, None]).exp()
    grad, v = grad_out.float(), value.float()
    delta_BHT1 = (grad * out.float()).sum(-1, keepdim=True)
    ds_BHTS = p_BHTS * (grad @ v.mT - delta_BHT1) * scale
    grads = ds_BHTS @ key.float(), ds_BHTS.mT @ query.float(), p_BHTS.mT @ grad
    return (*(x.to(query.dtype) for x in grads), None)


def scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores_BHTS = q.float() @ k.float().mT * scale
    if bias is not None:
        scores_BHTS = scores_BHTS + bias
    if is_causal:  # aligned at the first key
        scores_BHTS = scores_BHTS.masked_fill(
            scores_BHTS.new_ones(scores_BHTS.shape[-2:]).tril() == 0, -torch.inf
        )
    demand(bool((scores_BHTS > -torch.inf).any(-1).all()), "each query sees a key")
    return scores_BHTS


def check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float) -> None:
    """Of aten/src/ATen/native/transformers/cuda, mem_eff_attention/kernel_forward.h and
    kernel_backward.h: `check_supported`, and what comes before it."""
    demand(dropout == 0, "no dropout, as its random state is not kept")
    demand(all(x.dtype == q.dtype for x in (k, v)), "one dtype")
    demand(q.dtype != torch.float64, "not float64")
    demand(q.shape[:2] == k.shape[:2] == v.shape[:2], "no grouped heads")
    demand(all(x.stride(-1) == 1 for x in (q, k, v)), "contiguous last dimension")
    demand(all(is_aligned(x) for x in (q, k, v)), "aligned query, key and value")
    if bias is not None:
        shape = (*q.shape[:3], k.shape[2])
        demand(bias.shape == shape and bias.dtype == q.dtype, "a bias of all heads, in their dtype")
        demand(bias.stride(-1) == 1 and is_aligned(bias), "aligned bias")


def is_aligned(x: Tensor) -> bool:
    """16 bytes at the begin of each row: 8 numbers of half precision, 4 of float32."""
    numbers = 16 // x.element_size()
    steps = [stride for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1]
    return all(step % numbers == 0 for step in (*steps, x.storage_offset()))
