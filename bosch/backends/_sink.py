"""Attention with a sink: a constant key and value of each group, beside the keys of the window.

Pretrained models put much of their attention on the first token of a text. A group that loses it to
its window has to put that weight elsewhere, and is wrong everywhere; a constant in its place, the
mean of other texts' first tokens, repairs most of it. (Measured: docs/results.md.)

A kernel that returns the log-sum-exp of its scores needs no column for it. With s = scaling * q . k
of the sink, the outputs merge by their shares of the softmax:

    total = log(exp(lse) + exp(s))        out = out * exp(lse - total) + v * exp(s - total)

The gradient needs none of lse's, which most kernels do not give: a flash kernel's backward computes
each probability anew as exp(score - lse), and the sum it subtracts from the output. Handed the
merged output and total, it gives the gradients of the merged attention with respect to q, k and v;
the sink's own share is added in closed form.
"""
# B batch, H query heads, G kv heads, R query heads a group, T queries, S keys, D head size

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from bosch.backends._interface import Sink


class Kernel(Protocol):
    """Attention without the sink, as a pair of functions."""

    def forward(self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
        """The output, (B, H, T, D), and the log-sum-exp, (B, H, T)."""

    def backward(
        self, grad_BHTD: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BHT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""


def attend_with_sink(
    kernel: Kernel, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, sink: Sink, scaling: float
) -> Tensor:
    """The output of a kernel, merged with the sink: (B, H, T, D)."""
    tensors = q_BHTD, k_BGSD, v_BGSD, sink.k_GD, sink.v_GD
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        merged: Tensor = _WithSink.apply(kernel, scaling, sink.seen_BT, *tensors)
        return merged
    out_BHTD, lse_BHT = kernel.forward(q_BHTD, k_BGSD, v_BGSD)
    return _merge(out_BHTD, lse_BHT, q_BHTD, sink, scaling)[0]


def _merge(
    out_BHTD: Tensor, lse_BHT: Tensor, q_BHTD: Tensor, sink: Sink, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The merged output, the merged log-sum-exp and the sink's share of each query."""
    repeats = q_BHTD.shape[1] // sink.k_GD.shape[0]
    keys_HD1 = (sink.k_GD * scaling).repeat_interleave(repeats, 0).to(q_BHTD.dtype)[..., None]
    s_BHT = (q_BHTD @ keys_HD1).squeeze(-1).to(lse_BHT.dtype)
    s_BHT = s_BHT.masked_fill(~sink.seen_BT[:, None], -torch.inf)
    # Not from the total: a query that sees nothing at all has -inf for both.
    share_BHT = torch.sigmoid(s_BHT - lse_BHT).masked_fill(~sink.seen_BT[:, None], 0)
    values_H1D = sink.v_GD.repeat_interleave(repeats, 0).to(out_BHTD.dtype)[:, None]
    merged_BHTD = torch.lerp(out_BHTD, values_H1D, share_BHT[..., None].to(out_BHTD.dtype))
    return merged_BHTD, torch.logaddexp(lse_BHT, s_BHT), share_BHT


class _WithSink(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, scaling: float, seen_BT: Tensor, q: Tensor, k: Tensor, v: Tensor,
        k_GD: Tensor, v_GD: Tensor,
    ) -> Tensor:  # fmt: skip
        out_BHTD, lse_BHT = kernel.forward(q, k, v)
        merged, total, share = _merge(out_BHTD, lse_BHT, q, Sink(k_GD, v_GD, seen_BT), scaling)
        ctx.kernel, ctx.scaling = kernel, scaling
        ctx.save_for_backward(q, k, v, k_GD, v_GD, merged, total, share)
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BHTD,) = grads
        q, k, v, k_GD, v_GD, merged, total, share_BHT = ctx.saved_tensors
        dq, dk, dv = ctx.kernel.backward(grad_BHTD, q, k, v, merged, total)
        groups, exact = k_GD.shape[0], torch.promote_types(k_GD.dtype, torch.float32)
        q_BGND, grad_BGND, merged_BGND = (
            x.to(exact).unflatten(1, (groups, -1)).flatten(2, 3) for x in (q, grad_BHTD, merged)
        )
        share_BGN = share_BHT.to(exact).unflatten(1, (groups, -1)).flatten(2, 3)
        # The derivative of a softmax: share * (grad . value - grad . output).
        value_GD1, key_G1D = v_GD.to(exact)[..., None], k_GD.to(exact)[:, None]
        of_value_BGN = (grad_BGND @ value_GD1).squeeze(-1) - (grad_BGND * merged_BGND).sum(-1)
        ds_BGN1 = (share_BGN * of_value_BGN * ctx.scaling)[..., None]
        dq = dq + (ds_BGN1 * key_G1D).unflatten(2, (-1, q.shape[2])).flatten(1, 2).to(dq.dtype)
        dk_GD = (ds_BGN1 * q_BGND).sum((0, 2)).to(k_GD.dtype)
        dv_GD = (share_BGN[..., None] * grad_BGND).sum((0, 2)).to(v_GD.dtype)
        return None, None, None, dq, dk, dv, dk_GD, dv_GD
