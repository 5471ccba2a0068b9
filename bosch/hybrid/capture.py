"""Passes queries, keys and values of each layer to a function while the dense model runs.

    with capturing(model):
        model.base_model(ids, use_cache=False, bosch_collect=collect)

calls `collect(layer, q_HTD, k_GTD, v_GTD, scaling)` in the forward pass of each layer, after rotary
positions. With `bosch_collect_gradient=collect` the call is made in the backward pass instead, once
for each layer, with one more argument: `do_HTD`, the gradient of the loss with respect to the
attention output. Attention is dense, and never makes a T x T matrix.
"""
# B batch (1), H query heads, G kv heads, T tokens, D head size

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from bosch.hybrid.attention import bosch_attention
from bosch.hybrid.documents import bosch_mask_function
from bosch.run.errors import UserError

NAME = "bosch_capture"


@contextmanager
def capturing(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block the model takes the two arguments; after it the model is as before."""
    AttentionInterface.register(NAME, capture_attention)
    AttentionMaskInterface.register(NAME, bosch_mask_function)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def capture_attention(
    module: Any,
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    bosch_collect: Callable[..., None] | None = None,
    bosch_collect_gradient: Callable[..., None] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if query_BHTD.shape[0] != 1 or attention_mask is not None:
        problem = "attention statistics take one text at a time, without padding"
        raise UserError(f"{problem}; this batch has {query_BHTD.shape[0]} texts.")
    qkv = query_BHTD, key_BGTD, value_BGTD
    out_BTHD, _ = bosch_attention(module, *qkv, attention_mask, scaling, **others)
    if bosch_collect is not None:
        bosch_collect(module.layer_idx, query_BHTD[0], key_BGTD[0], value_BGTD[0], scaling)
    if bosch_collect_gradient is not None:
        collect = partial(bosch_collect_gradient, module.layer_idx)
        out_BTHD = _Tap.apply(out_BTHD, *qkv, scaling, collect)
    return out_BTHD, None


class _Tap(torch.autograd.Function):
    """The identity. Its backward hands the gradient to `collect` and passes it on. (With gradient
    checkpointing, hooks on recomputed tensors never fire, and the first one's closure would keep
    every layer's q, k and v in memory.)"""

    @staticmethod
    def forward(
        ctx: Any, out_BTHD: Tensor, q: Tensor, k: Tensor, v: Tensor, scaling: float, collect: Any
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scaling, ctx.collect = scaling, collect
        return out_BTHD.view_as(out_BTHD)

    @staticmethod
    def backward(ctx: Any, do_BTHD: Tensor) -> tuple[Tensor | None, ...]:
        q_HTD, k_GTD, v_GTD = (x[0] for x in ctx.saved_tensors)
        ctx.collect(q_HTD, k_GTD, v_GTD, ctx.scaling, do_BTHD[0].transpose(0, 1))
        return do_BTHD, None, None, None, None, None
