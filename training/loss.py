"""The loss without storing the logits: head and loss together, chunk by chunk; and Liger's kernels
for it, for norms and for MLPs.

For one sequence of 32,768 tokens and a vocabulary of 151,936, the logits and their gradient would
take 50 GB. Here only the logits of one chunk exist at a time, and those of the teacher for it.
"""
# B batch, T tokens, N = B * T rows, H hidden size, V vocabulary

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from bosch.data.loader import IGNORED  # which torch and Liger ignore by default
from bosch.hybrid.models import logit_factor
from bosch.kernels import fuse_blocks

# Rows whose logits exist at once. On a CPU with a vocabulary of 2,048, chunks of 512 rows take 90 %
# of the time of 2,048, as they fit its caches. Smaller ones would read a large head too often.
CHUNK_ROWS = 512


@dataclass(frozen=True)
class Lesson:
    """What a teacher (training/teacher.py) says about the tokens of a micro-batch."""

    hidden_NH: Tensor
    head_VH: Tensor
    weight: float = 1.0  # of its distribution in the loss; the rest is cross entropy
    temperature: float = 1.0
    reverse: float = 0.0  # share of the divergence of the teacher from the student

    def divergence(self, student_NV: Tensor, rows: slice) -> Tensor:
        """Kullback-Leibler divergence from the teacher's distribution, of some rows; of the student
        the logarithms of the shares."""
        teacher_NV = F.linear(self.hidden_NH[rows], self.head_VH).float() / self.temperature
        teacher_NV = F.log_softmax(teacher_NV, dim=1)
        forward_NV = F.kl_div(student_NV, teacher_NV, reduction="none", log_target=True)
        if not self.reverse:
            return forward_NV.sum(1)
        reverse_NV = F.kl_div(teacher_NV, student_NV, reduction="none", log_target=True)
        return ((1 - self.reverse) * forward_NV + self.reverse * reverse_NV).sum(1)


@dataclass(frozen=True)
class StoredLesson:
    """The same from a file of lessons: of each row a sample of the tokens (`draw`), the logarithms
    of their shares, and last of the least that one of them counts."""

    ids_NK: Tensor
    log_shares_NR: Tensor  # R = K + 1
    weight: float = 1.0
    temperature: float = 1.0

    def known(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The logarithms of the shares of some rows, and what each counts."""
        log_NK, least_N1 = self.log_shares_NR[rows].float().split([self.ids_NK.shape[1], 1], dim=1)
        return log_NK, torch.maximum(log_NK, least_N1).exp()

    def divergence(self, student_NV: Tensor, rows: slice) -> Tensor:
        log_NK, counts_NK = self.known(rows)
        return (counts_NK * (log_NK - student_NV.gather(1, self.ids_NK[rows]))).sum(1)


def draw(log_shares_NV: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A priority sample (Duffield, Lund and Thorup, 2007) as a StoredLesson has it: the likeliest
    tokens, and some of the others, each of which stands for many. Sums over it are right on
    average; the likeliest alone leave out a fifth of what a small model says."""
    # Priorities p / u with u uniform; those of the drawn tokens are above that of the next.
    # (exponential_ would give -log u, six times as slowly on a CPU.)
    log_NV = torch.empty_like(log_shares_NV).uniform_(2.0**-24, 1, generator=generator).log_()
    keys_NR, ids_NR = torch.sub(log_shares_NV, log_NV, out=log_NV).topk(count + 1)
    log_NK = log_shares_NV.gather(1, ids_NR[:, :-1])
    return ids_NR[:, :-1], torch.cat([log_NK, keys_NR[:, -1:]], dim=1)


class LossHead(nn.Linear):
    """A model's head that returns the loss when one is set, and logits when not. The model's own
    forward calls it: no forward is replaced, and fully_shard's hooks run."""

    kernels: str = "torch"
    factor: float = 1.0  # what the model multiplies the head's output by
    loss: Callable[[Tensor, Tensor], Tensor] | None = None  # of hidden states and weight

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        if self.loss is None:
            return super().forward(hidden_BTH)
        if self.factor == 1:
            return self.loss(hidden_BTH, self.weight)
        # The loss is of the logits, so of the factor times the head's output. The model then
        # multiplies the loss by it as if that were logits, which is undone here.
        return self.loss(hidden_BTH * self.factor, self.weight) / self.factor


def install_kernels(model: PreTrainedModel, kernels: str, in_blocks: bool = True) -> None:
    """Make the head of a model of our families a LossHead; weight names and ties stay the same.
    in_blocks: with Liger's kernels, use its RMSNorm and SwiGLU too; not in compiled blocks, which
    fuse the same themselves (torch 2.11 cannot read Liger's kernels in a graph, and takes all that
    they are given for changed)."""
    head: Any = model.get_submodule("lm_head")
    assert head.bias is None, "no family's head has a bias"
    head.__class__, head.kernels = LossHead, kernels
    head.factor = logit_factor(model.config)
    if kernels == "liger" and in_blocks:
        fuse_blocks(model)


def model_loss(
    model: PreTrainedModel,
    inputs: Mapping[str, object],
    labels_BT: Tensor,
    scale: float,
    lesson: Lesson | StoredLesson | None = None,
) -> Tensor:
    """Sum of the losses of all targets, times `scale`. Labels are already shifted: those of the
    next tokens."""
    kernels = model.lm_head.kernels
    loss = partial(head_loss, labels_BT=labels_BT, scale=scale, kernels=kernels, lesson=lesson)
    return call_with(loss, model, inputs)


@torch.no_grad()
def token_losses(model: PreTrainedModel, inputs: Mapping[str, object], labels_BT: Tensor) -> Tensor:
    """The cross entropy of each target, 0 where there is none."""

    def losses(hidden_BTH: Tensor, weight_VH: Tensor) -> Tensor:
        both = hidden_BTH.flatten(0, 1), labels_BT.flatten()
        chunks = zip(*(each.split(CHUNK_ROWS) for each in both), strict=True)
        found = [
            F.cross_entropy(F.linear(hidden, weight_VH).float(), labels, reduction="none")
            for hidden, labels in chunks
        ]
        return torch.cat(found).view_as(labels_BT)

    return call_with(losses, model, inputs)


def call_with(
    loss: Callable[[Tensor, Tensor], Tensor], model: Any, inputs: Mapping[str, object]
) -> Tensor:
    """The whole model, with this loss in place of the logits."""
    # Set on the head, and not an argument of the model: its forward passes none on to the head.
    model.lm_head.loss = loss
    try:
        return model(**inputs, use_cache=False).logits
    finally:
        model.lm_head.loss = None


def head_loss(
    hidden_BTH: Tensor,
    weight_VH: Tensor,
    labels_BT: Tensor,
    scale: float,
    kernels: str,
    lesson: Lesson | StoredLesson | None = None,
) -> Tensor:
    hidden_NH, labels_N = hidden_BTH.flatten(0, 1), labels_BT.flatten()
    if not torch.is_grad_enabled():  # kernels only look at requires_grad
        weight_VH = weight_VH.detach()
    # Liger adds up a bf16 weight's gradient over chunks in fp32.
    if kernels == "liger" and lesson is None:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        loss = liger_fused_linear_cross_entropy(
            hidden_NH, weight_VH, labels_N, reduction="sum", accum_dtype=torch.float32
        )
        return loss * scale
    plain = isinstance(lesson, Lesson) and lesson.weight == 1 and not lesson.reverse
    if kernels == "liger" and isinstance(lesson, Lesson) and plain:
        from liger_kernel.transformers.functional import liger_fused_linear_jsd

        mean = liger_fused_linear_jsd(
            hidden_NH,
            weight_VH,
            lesson.hidden_NH,
            lesson.head_VH,
            labels_N,
            jsd_beta=0.0,  # the divergence from the teacher
            temperature=lesson.temperature,
            accum_dtype=torch.float32,
        )
        # Liger gives the mean over the targets, and leaves out the square of the temperature.
        return mean * ((labels_N != IGNORED).sum() * lesson.temperature**2 * scale)

    if isinstance(lesson, StoredLesson) and lesson.weight == 1:
        scale_N = torch.where(labels_N != IGNORED, scale * lesson.temperature**2, 0.0)
        return StoredLoss.apply(hidden_NH, weight_VH, lesson, scale_N)

    def loss_of(logits_NV: Tensor, rows: slice) -> Tensor:
        labels = labels_N[rows]
        if lesson is None:
            return F.cross_entropy(logits_NV, labels, reduction="sum") * scale
        # Times the square of the temperature: the gradient keeps its size.
        student_NV = F.log_softmax(logits_NV / lesson.temperature, dim=1)
        divergence = lesson.divergence(student_NV, rows) * lesson.temperature**2
        taught = torch.where(labels != IGNORED, divergence, 0.0).sum()
        if lesson.weight == 1:
            return taught * scale
        rest = (1 - lesson.weight) * F.cross_entropy(logits_NV, labels, reduction="sum")
        return (lesson.weight * taught + rest) * scale

    return ChunkedLoss.apply(hidden_NH, weight_VH, loss_of)


class ChunkedLoss(torch.autograd.Function):
    """Computes the gradients together with the loss, so that no product is computed twice. Each
    chunk uses plain autograd: with one chunk, the numbers are those of linear + `loss_of`, which
    gets the logits of some rows, and which rows they are."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, loss_of: Callable[[Tensor, slice], Tensor]
    ) -> Tensor:
        needs_grad, weight_learns = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[1]
        loss = torch.zeros((), device=hidden_NH.device)
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_grad else None
        grad_weight_VH: Tensor | None = None
        weight = weight_VH.detach().requires_grad_(weight_learns)
        for start in range(0, len(hidden_NH), CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            hidden = hidden_NH[chunk].detach().requires_grad_(needs_grad)
            with torch.set_grad_enabled(needs_grad):
                part = loss_of(F.linear(hidden, weight).float(), chunk)
            loss = loss + part.detach()
            if grad_hidden_NH is not None:
                # Asked for here, chunk by chunk: a later backward would need all chunks' logits.
                learning = (hidden, weight) if weight_learns else (hidden,)
                grad_hidden_NH[chunk], *grads = torch.autograd.grad(part, learning)
                # In fp32, since a bf16 sum over many chunks loses small summands.
                for grad in map(Tensor.float, grads):
                    grad_weight_VH = grad if grad_weight_VH is None else grad_weight_VH.add_(grad)
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        ctx.save_for_backward(grad_hidden_NH, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_loss,) = grad_outputs
        grads = (None if g is None else g * grad_loss.to(g.dtype) for g in ctx.saved_tensors)
        return *grads, None


class StoredLoss(torch.autograd.Function):
    """The divergence from a stored lesson, with its gradient written out, in the memory of one
    chunk. By autograd it took three times as long on a CPU: as much as a third of the training."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, lesson: StoredLesson, scale_N: Tensor
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        # Two buffers for all chunks: the logits in the type of the model, and their shares in fp32,
        # which become the gradient in place.
        rows = min(CHUNK_ROWS, len(hidden_NH))
        given_NV = hidden_NH.new_empty(rows, len(weight_VH))
        shares_NV = torch.empty_like(given_NV, dtype=torch.float32)
        loss = torch.zeros((), device=hidden_NH.device)
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        # Summed in fp32, as above.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        for start in range(0, len(hidden_NH), CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            hidden, ids_NK = hidden_NH[chunk], lesson.ids_NK[chunk]
            taught_NK, counts_NK = lesson.known(chunk)
            scale_N1 = scale_N[chunk, None]
            logits_NV, x_NV = given_NV[: len(hidden)], shares_NV[: len(hidden)]
            torch.mm(hidden, weight_VH.T, out=logits_NV)
            x_NV.copy_(logits_NV)
            if lesson.temperature != 1:
                x_NV.div_(lesson.temperature)

            # The shares up to a factor.
            x_NV.sub_(x_NV.amax(1, keepdim=True))
            log_NK = x_NV.gather(1, ids_NK)
            total_N1 = x_NV.exp_().sum(1, keepdim=True)
            loss += (scale_N1 * counts_NK * (taught_NK - log_NK + total_N1.log())).sum()

            # With c what a drawn token counts, t the log of its taught share and p the student's:
            #     loss = sum_k c_k * (t_k - log p_k)      d loss / d logit_v = p_v * sum_k c_k - c_v
            # and c_v is 0 for a token that was not drawn.
            factor_N1 = scale_N1 / lesson.temperature
            x_NV.mul_(factor_N1 * counts_NK.sum(1, keepdim=True) / total_N1)
            x_NV.scatter_add_(1, ids_NK, -factor_N1 * counts_NK)
            logits_NV.copy_(x_NV)
            if grad_hidden_NH is not None:
                grad_hidden_NH[chunk] = logits_NV @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += logits_NV.T @ hidden
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        ctx.save_for_backward(grad_hidden_NH, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return *ChunkedLoss.backward(ctx, *grad_outputs)[:2], None, None
