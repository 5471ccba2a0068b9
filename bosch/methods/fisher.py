"""Fisher-weighted locality: the share of attention inside the window, weighted by its effect on the
loss.

Equations 23 to 25 of the paper, with L the loss and a(t, j) what row t gives to key j:

    F(t, j) = (dL/da(t, j) * a(t, j))^2,    s = (sum of F where t - j < W) / (sum of F)

For out_t = sum_j a(t, j) v_j the gradient dL/da(t, j) is do_t . v_j, so autograd only runs one
backward pass to the attention outputs; probabilities and gradients are then recomputed in chunks of
rows. The first tokens of a sink count as inside, as in dcam.py."""
# L layers, H query heads, G kv heads, T tokens, C rows of a chunk, S keys, D head size, N rows of a
# loss, V vocabulary, P parts: inside the window, and total

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bosch.calibration import Haystack
from bosch.hybrid.models import logits_of
from bosch.method import Inputs, MethodTraits, Scores
from bosch.methods._examples import Result, measure_haystacks
from bosch.methods._statistics import add_up, attention_rows, exact_sum, row_scores

traits = MethodTraits(measures=True)

HEAD_ROWS = 512  # rows of logits held at once


@dataclass(frozen=True)
class Settings:
    """What the paper leaves open: the tokens of its "token-level cross-entropy"."""

    # answer: the mean over each answer's tokens, summed over its questions. Kwon et al. use
    # the loss of the task, and the task is to give the answer; over all tokens the haystack
    # would dominate, with thousands of tokens per answer. all: the mean over all but the first
    # token.
    loss_tokens: Literal["answer", "all"] = "answer"


def score_groups(inputs: Inputs) -> Scores:
    results = measure_haystacks(inputs, "fisher", partial(measure_haystack, inputs))
    local_LH, total_LH = add_up(results, "local"), add_up(results, "total")
    # A head that does not affect the loss loses nothing by a window: it is local.
    score_LH = torch.where(total_LH == 0, 1.0, local_LH / total_LH)
    return Scores.of_heads(score_LH, inputs.num_groups, "local")


def measure_haystack(inputs: Inputs, haystack: Haystack) -> Result:
    """Sums of the saliency (eq. 23), inside the window and in total, [layer][head]."""
    sums: dict[int, tuple[list[float], list[float]]] = {}  # by layer: inside, total

    def collect(
        layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scaling: float, do_HTD: Tensor
    ) -> None:
        sums_PH = torch.zeros(2, q_HTD.shape[0], dtype=torch.float64, device=q_HTD.device)
        for rows in attention_rows(q_HTD, k_GTD, scaling, inputs.chunk_elements):
            do_HCD, v_GSD = do_HTD[:, rows.start : rows.stop], v_GTD[:, : rows.stop]
            # As a product of all rows with all values, do . v is a matrix like q . k.
            saliency_HCS = row_scores(do_HCD, v_GSD).mul_(rows.weights_HCS).square_()
            first, inside_CS = rows.inside(inputs.window_tokens)
            sums_PH[0] += exact_sum(saliency_HCS[..., first:] * inside_CS)
            sink_HCN = saliency_HCS[..., : inputs.sink.num_visible]
            sums_PH[0] += exact_sum(sink_HCN * rows.past(inputs.window_tokens, sink_HCN.shape[2]))
            sums_PH[1] += exact_sum(saliency_HCS)
        sums[layer] = tuple(sums_PH.tolist())

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, out: Tensor) -> Tensor:
        tapped: Tensor = Tap.apply(out, q, k, v, scaling, partial(collect, layer))
        return tapped

    model = inputs.model
    with computing_again(model), torch.enable_grad():
        ids_T = haystack.ids_T.to(model.device)
        with torch.no_grad():
            embeddings_BTD = model.get_input_embeddings()(ids_T[None])
        hidden_BTD = model.base_model(
            inputs_embeds=embeddings_BTD.requires_grad_(),
            use_cache=False,
            bosch_observe=observe,
        ).last_hidden_state
        # The gradient of the loss at the last hidden states, a few rows of logits at a time: those
        # of a whole text, tokens x vocabulary, would be the largest tensor of all.
        spans = [question.predicting for question in haystack.questions]
        if inputs.settings.loss_tokens == "all":
            spans = [range(len(ids_T) - 1)]
        gradient_TD = torch.zeros_like(hidden_BTD[0])
        for span in spans:
            for start in range(span.start, span.stop, HEAD_ROWS):
                stop = min(start + HEAD_ROWS, span.stop)
                last_ND = hidden_BTD[0, start:stop].detach().requires_grad_()
                logits_NV = logits_of(model, last_ND)
                logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
                next_N = ids_T[start + 1 : stop + 1].to(logits_NV.device)
                loss = F.cross_entropy(logits_NV, next_N, reduction="sum") / len(span)
                gradient_TD[start:stop] += torch.autograd.grad(loss, last_ND)[0]
        torch.autograd.grad(hidden_BTD, embeddings_BTD, gradient_TD[None])
    local, total = zip(*(sums[layer] for layer in range(inputs.num_layers)), strict=True)
    return {"local": local, "total": total}


class Tap(torch.autograd.Function):
    """The identity. Its backward hands the gradient to `collect` and passes it on. (A hook never
    fires on a tensor that is computed again, and its closure would keep q, k and v in memory.)"""

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


@contextmanager
def computing_again(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block each layer is computed again in the backward pass, so that only one layer's
    activations are held. The switch of transformers for that puts the whole model in training mode
    and leaves a hook behind."""
    layers: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # restores the method of the class
