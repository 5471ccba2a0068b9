"""Fisher-weighted locality: the share of attention inside the window, weighted by its effect on the
loss.

Equations 23 to 25 of the paper. For out = sum_j a_j v_j the gradient of the loss with respect to
the probability a(t, j) is do_t . v_j, so autograd only runs one backward pass to the attention
outputs; probabilities and gradients are then recomputed in chunks of rows."""
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
from bosch.hybrid.capture import capturing
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
    # Recompute each layer in the backward pass, to hold only one layer's activations at a time.
    recompute: bool = True


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
            saliency_HCS = row_scores(do_HCD, v_GSD).mul_(rows.weights_HCS).square_()
            first, inside_CS = rows.inside(inputs.window_tokens)
            sums_PH[0] += exact_sum(saliency_HCS[..., first:] * inside_CS)
            sums_PH[1] += exact_sum(saliency_HCS)
        sums[layer] = tuple(sums_PH.tolist())

    model, settings = inputs.model, inputs.settings
    with frozen(model, settings.recompute), capturing(model), torch.enable_grad():
        ids_T = haystack.ids_T.to(model.device)
        with torch.no_grad():
            embeddings_BTD = model.get_input_embeddings()(ids_T[None])
        hidden_BTD = model.base_model(
            inputs_embeds=embeddings_BTD.requires_grad_(),
            use_cache=False,
            bosch_collect_gradient=collect,
        ).last_hidden_state
        # The gradient of the loss at the last hidden states, a few rows of logits at a time.
        spans = [question.predicting for question in haystack.questions]
        if settings.loss_tokens == "all":
            spans = [range(len(ids_T) - 1)]
        last_TD, head = hidden_BTD[0].detach().requires_grad_(), model.get_output_embeddings()
        for span in spans:
            for start in range(span.start, span.stop, HEAD_ROWS):
                stop = min(start + HEAD_ROWS, span.stop)
                logits_NV = head(last_TD[start:stop])
                logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
                next_N = ids_T[start + 1 : stop + 1].to(logits_NV.device)
                (F.cross_entropy(logits_NV, next_N, reduction="sum") / len(span)).backward()
        hidden_BTD.backward(last_TD.grad[None])
    local, total = zip(*(sums[layer] for layer in range(inputs.num_layers)), strict=True)
    return {"local": local, "total": total}


@contextmanager
def frozen(model: PreTrainedModel, recompute: bool) -> Iterator[None]:
    """Inside the block no parameter gets a gradient, and those of each layer's activations are
    checkpointed. The switch of transformers for that puts the whole model in training mode and
    leaves a hook behind."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    blocks = model.modules() if recompute else ()
    layers: list[Any] = [block for block in blocks if isinstance(block, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # restores the method of the class
        for parameter in trainable:
            parameter.requires_grad_(True)
