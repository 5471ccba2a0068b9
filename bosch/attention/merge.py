"""Attention with a sink: keys and values of each group beside those of its window, a constant one
or the first tokens of the text.

A kernel that returns the log-sum-exp of its scores needs no columns for them. With the scores
s = scaling * q . k of the sink, the outputs merge by their shares of the softmax:

    total = log(exp(lse) + sum(exp(s)))     out = out * exp(lse - total) + exp(s - total) @ v

The gradient needs none of lse's, which most kernels do not give: a flash kernel's backward computes
each probability anew as exp(score - lse), and the sum it subtracts from the output. Handed the
merged output and total, it gives the gradients of the merged attention with respect to q, k and v;
the sink's own share is added in closed form. It is a sum over all queries, so it stays in float32
until it is whole: in bfloat16 it was up to 1.3 times as far off as the contract allows (CPU).
"""
# B batch, H query heads, G kv heads, T queries, S keys, N keys of the sink, D head size

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bosch.attention.call import AttentionCall

Forward = Callable[..., tuple[Tensor, Tensor]]


def exact_sink(call: AttentionCall) -> AttentionCall:
    """The call with its sink in float32, if gradients are needed: they add up in it and become what
    the sink was at the end."""
    if (sink := call.sink) is None or not call.needs_grad:
        return call
    exact = torch.promote_types(call.q_BHTD.dtype, torch.float32)
    k_BGND, v_BGND = sink.k_BGND.to(exact), sink.v_BGND.to(exact)
    return replace(call, sink=replace(sink, k_BGND=k_BGND, v_BGND=v_BGND))


def scores_of(call: AttentionCall) -> Tensor:
    """(B, H, T, N): the scores of the sink's keys, -inf where a query does not see them."""
    q_BHTD, sink = call.q_BHTD, call.sink
    assert sink is not None
    repeats = q_BHTD.shape[1] // sink.k_BGND.shape[1]
    exact = torch.promote_types(q_BHTD.dtype, torch.float32)
    keys_BHDN = (sink.k_BGND.to(exact) * call.scaling).repeat_interleave(repeats, 1).mT
    return (q_BHTD.to(exact) @ keys_BHDN).masked_fill(~sink.seen_BTN[:, None], -torch.inf)


def attend_with_sink(
    call: AttentionCall, forward: Forward, backward: Callable[..., Any] | None
) -> Tensor:
    """The output of a kernel, merged with the sink: (B, H, T, D). The kernel is attention without
    the sink: `forward(q, k, v)` gives the output and the log-sum-exp (B, H, T), and
    `backward(grad, q, k, v, output, log_sum_exp)` the gradients of q, k and v."""
    call = exact_sink(call)
    q_BHTD, sink = call.q_BHTD, call.sink
    assert sink is not None
    s_BHTN = sink.scores_BHTN  # known where a backend has cut one call into many
    if s_BHTN is None:
        s_BHTN = scores_of(call)
    repeats = q_BHTD.shape[1] // sink.v_BGND.shape[1]
    k_BGSD, v_BGSD = call.k_BGSD, call.v_BGSD
    values_BHND = sink.v_BGND.repeat_interleave(repeats, 1)
    if torch.is_grad_enabled() and any(
        x.requires_grad for x in (q_BHTD, k_BGSD, v_BGSD, s_BHTN, values_BHND)
    ):
        merged: Tensor = _WithSink.apply(
            forward, backward, q_BHTD, k_BGSD, v_BGSD, s_BHTN, values_BHND
        )
        return merged
    out_BHTD, lse_BHT = forward(q_BHTD, k_BGSD, v_BGSD)
    # Tracing stops at a write into (B, T, H, D), and needs none.
    place = None if torch.compiler.is_compiling() else out_BHTD
    return _merge(out_BHTD, lse_BHT, s_BHTN, values_BHND, place=place)[0]


def merge_differentiably(call: AttentionCall, out_BHTD: Tensor, lse_BHT: Tensor) -> Tensor:
    """The same for a kernel whose log-sum-exp has a gradient: autograd does the rest."""
    call = exact_sink(call)
    assert call.sink is not None
    s_BHTN = scores_of(call)
    lse_BHT1 = lse_BHT.to(s_BHTN.dtype)[..., None]
    # A query that sees nothing (padding) has -inf for all, of which a difference is no number.
    lse_BHT1 = lse_BHT1.clamp_min(torch.finfo(lse_BHT1.dtype).min)
    total_BHT1 = torch.cat([lse_BHT1, s_BHTN], -1).logsumexp(-1, keepdim=True)
    share_BHTN = (s_BHTN - total_BHT1).exp()
    repeats = out_BHTD.shape[1] // call.sink.v_BGND.shape[1]
    values_BHND = call.sink.v_BGND.to(share_BHTN.dtype).repeat_interleave(repeats, 1)
    kept_BHTD = out_BHTD.to(share_BHTN.dtype) * (lse_BHT1 - total_BHT1).exp()
    return (kept_BHTD + share_BHTN @ values_BHND).to(out_BHTD.dtype)


def _merge(
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    s_BHTN: Tensor,
    values_BHND: Tensor,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The merged output (in this place), its log-sum-exp, and the sink's shares."""
    s_BHTN, values_BHND = s_BHTN.to(lse_BHT.dtype), values_BHND.to(out_BHTD.dtype)
    # One constant, as in most hybrids: a sigmoid, and no copy of log-sum-exp and scores together.
    if s_BHTN.shape[-1] == 1:
        s_BHT = s_BHTN[..., 0]
        # Not from the total: a query that sees nothing at all has -inf for both. Only what is
        # hidden becomes 0: a NaN elsewhere has to show.
        share_BHT = torch.sigmoid(s_BHT - lse_BHT).masked_fill_(s_BHT == -torch.inf, 0)
        weight_BHT1 = share_BHT[..., None].to(out_BHTD.dtype)
        merged_BHTD = torch.lerp(out_BHTD, values_BHND, weight_BHT1, out=place)
        return merged_BHTD, torch.logaddexp(lse_BHT, s_BHT), share_BHT[..., None]
    total_BHT1 = torch.cat([lse_BHT[..., None], s_BHTN], -1).logsumexp(-1, keepdim=True)
    share_BHTN = (s_BHTN - total_BHT1).exp_().masked_fill_(s_BHTN == -torch.inf, 0)
    kept_BHT1 = 1 - share_BHTN.sum(-1, keepdim=True)
    merged_BHTD = torch.mul(out_BHTD, kept_BHT1.to(out_BHTD.dtype), out=place)
    merged_BHTD.add_(share_BHTN.to(out_BHTD.dtype) @ values_BHND)
    return merged_BHTD, total_BHT1[..., 0], share_BHTN


class _WithSink(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Forward, backward: Any, q: Tensor, k: Tensor, v: Tensor, s_BHTN: Tensor,
        values_BHND: Tensor,
    ) -> Tensor:  # fmt: skip
        # Not in the kernel's output, which selective checkpointing keeps.
        merged, total, share = _merge(*forward(q, k, v), s_BHTN, values_BHND)
        ctx.backward_of_kernel = backward
        ctx.save_for_backward(q, k, v, values_BHND, merged, total, share)
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BHTD,) = grads
        # `merged` and `total` in the place of the kernel's own output and log-sum-exp: the
        # docstring of this file says why these give the gradients of the merged attention.
        q, k, v, values_BHND, merged, total, share_BHTN = ctx.saved_tensors
        dq, dk, dv = ctx.backward_of_kernel(grad_BHTD, q, k, v, merged, total)
        grad_BHTD, values = grad_BHTD.to(share_BHTN.dtype), values_BHND.to(share_BHTN.dtype)
        # The derivative of a softmax: share * (grad . value - grad . output). It is the gradient of
        # the scores only: they were computed outside of this function, so autograd takes it on to
        # the queries and to the keys of the sink.
        if share_BHTN.shape[-1] == 1:
            of_value_BHTN = (grad_BHTD * (values - merged)).sum(-1, keepdim=True)
            dvalues_BHND = (grad_BHTD * share_BHTN).sum(2, keepdim=True)
        else:
            of_value_BHTN = grad_BHTD @ values.mT
            of_value_BHTN -= (grad_BHTD * merged).sum(-1, keepdim=True)
            dvalues_BHND = share_BHTN.mT @ grad_BHTD
        # Constants are one row for the whole batch: its gradients add up.
        dvalues_BHND = dvalues_BHND.sum_to_size(values_BHND.shape).to(values_BHND.dtype)
        return None, None, dq, dk, dv, share_BHTN * of_value_BHTN, dvalues_BHND
