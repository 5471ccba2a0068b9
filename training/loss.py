"""The loss without storing the logits: head and cross entropy together, chunk by chunk.

For one sequence of 32,768 tokens and a vocabulary of 151,936, the logits and their gradient would
take 50 GB. Here only the logits of one chunk exist at a time.
"""
# B batch, T tokens, N = B * T rows, H hidden size, V vocabulary

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from bosch.data.loader import IGNORED

# Rows whose logits exist at once. On a CPU with a vocabulary of 2,048, chunks of 512 rows take 90 %
# of the time of 2,048, as they fit its caches. Smaller ones would read a large head too often.
CHUNK_ROWS = 512


class LossHead(nn.Linear):
    """A model's head that returns the loss when `labels_BT` is set, and logits when not.

    The model's own forward calls it: no forward is replaced, and fully_shard's hooks run. The loss
    is the sum over the targets times `scale`. Labels are already shifted: those of the next tokens.
    """

    labels_BT: Tensor | None = None
    scale: float = 1.0
    kernels: str = "torch"

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        if self.labels_BT is None:
            return super().forward(hidden_BTH)
        return head_loss(hidden_BTH, self.weight, self.labels_BT, self.scale, self.kernels)


def install_loss_head(model: PreTrainedModel, kernels: str) -> LossHead:
    """Make the head of a causal language model a LossHead. Weight names and ties stay the same."""
    head = model.get_submodule("lm_head")
    assert isinstance(head, nn.Linear)
    assert head.bias is None, "no family's head has a bias"
    head.__class__ = LossHead
    assert isinstance(head, LossHead)
    head.kernels = kernels
    return head


def model_loss(
    model: PreTrainedModel, inputs: Mapping[str, object], labels_BT: Tensor, scale: float
) -> Tensor:
    """Sum of the losses of all targets, times `scale`. Calls the whole model."""
    head = model.get_submodule("lm_head")
    assert isinstance(head, LossHead)
    head.labels_BT, head.scale = labels_BT, scale
    try:
        loss: Tensor = model(**inputs, use_cache=False).logits
        return loss
    finally:
        head.labels_BT = None


def head_loss(
    hidden_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor, scale: float, kernels: str
) -> Tensor:
    hidden_NH, labels_N = hidden_BTH.flatten(0, 1), labels_BT.flatten()
    if not torch.is_grad_enabled():  # kernels only look at requires_grad
        weight_VH = weight_VH.detach()
    if kernels == "liger":
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        total: Tensor = liger_fused_linear_cross_entropy(
            hidden_NH,
            weight_VH,
            labels_N,
            ignore_index=IGNORED,
            reduction="sum",
            accum_dtype=torch.float32,  # for the sum of a bf16 weight's gradient over chunks
        )
        return total * scale
    loss: Tensor = ChunkedCrossEntropy.apply(hidden_NH, weight_VH, labels_N, scale)
    return loss


class ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients together with the loss, so that no product is computed twice.

    Each chunk uses plain autograd: with one chunk, the numbers are those of linear + cross_entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, scale: float
    ) -> Tensor:
        needs_grad = any(ctx.needs_input_grad[:2])
        loss = torch.zeros((), device=hidden_NH.device)
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_grad else None
        grad_weight_VH: Tensor | None = None
        for start in range(0, len(labels_N), CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            hidden, weight = hidden_NH[chunk].detach(), weight_VH.detach()
            with torch.set_grad_enabled(needs_grad):
                hidden.requires_grad_(needs_grad)
                weight.requires_grad_(needs_grad)
                logits = F.linear(hidden, weight).float()
                labels = labels_N[chunk]
                part = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
                part = part * scale
            loss = loss + part.detach()
            if grad_hidden_NH is not None:
                grads = torch.autograd.grad(part, (hidden, weight))
                grad_hidden_NH[chunk] = grads[0]
                # In fp32, since a bf16 sum over many chunks loses small summands.
                grad = grads[1].float()
                grad_weight_VH = grad if grad_weight_VH is None else grad_weight_VH.add_(grad)
        if needs_grad:
            assert grad_weight_VH is not None
            ctx.save_for_backward(grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden_NH, grad_weight_VH = ctx.saved_tensors
        (grad_loss,) = grad_outputs
        return (
            grad_hidden_NH * grad_loss.to(grad_hidden_NH.dtype),
            grad_weight_VH * grad_loss.to(grad_weight_VH.dtype),
            None,
            None,
        )
