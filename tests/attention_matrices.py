"""Static scores by the paper's equations, from whole attention matrices: slow, simple, in float64.
Also toy calibration texts for them."""
# L layers, H query heads, G kv heads, T tokens, D head size

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from bosch.attention.call import repeat_groups
from bosch.calibration import Calibration, Haystack, Question
from bosch.method import Inputs, Learning
from bosch.model import ModelInfo


def toy_haystack(length: int, seed: int, num_questions: int = 2, vocab: int = 96) -> Haystack:
    """Random tokens; each answer repeats three tokens of its needle."""
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(2, vocab, (length,), generator=generator)
    questions = []
    for number in range(num_questions):
        start = int(torch.randint(1, length // 2, (), generator=generator))
        stop = length - 5 * (num_questions - number - 1)
        ids_T[stop - 3 : stop] = ids_T[start + 2 : start + 5]
        questions.append(Question(range(stop - 3, stop), range(start, start + 6), f"task {number}"))
    return Haystack(ids_T, tuple(questions))


def toy_calibration(length: int = 512, count: int = 3, vocab: int = 96) -> Calibration:
    """Texts of different lengths, the first the longest."""
    lengths = [length - length // 14 * number for number in range(count)]
    return Calibration([toy_haystack(x, number, vocab=vocab) for number, x in enumerate(lengths)])


def info_of(model: PreTrainedModel) -> ModelInfo:
    config = model.config
    heads = config.num_key_value_heads, config.num_attention_heads
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    known_by = "random/model", None, "f" * 32
    return ModelInfo(*known_by, config.num_hidden_layers, *heads, head_dim)


def inputs_of(
    method: Any, model: PreTrainedModel, calibration: Calibration, folder: Path,
    settings: dict[str, Any] | None = None, learning: Learning | None = None, **changes: Any,
) -> Inputs:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    inputs = Inputs(
        model_info=info_of(model),
        load_model=lambda: model,
        load_calibration=lambda: calibration,
        window_tokens=32,
        ratio=0.5,
        seed=0,
        folder=folder,
        learning=learning,
        settings=method.Settings(**(settings or {})),
    )
    return replace(inputs, **changes)


@dataclass(frozen=True)
class Matrices:
    """The attention of one text in every layer."""

    weights_LHTT: Tensor
    q_LHTD: Tensor
    k_LHTD: Tensor  # repeated for every query head
    gradient_LHTT: Tensor | None  # of the loss, with respect to the weights
    scaling: float


def matrices(
    model: PreTrainedModel, haystack: Haystack, loss_spans: Sequence[range] = ()
) -> Matrices:
    """Whole attention matrices; with spans of rows also the gradient of the cross-entropy there:
    the mean over each span, summed."""
    AttentionInterface.register("whole_matrices", _attention)
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("whole_matrices")
    layers: list[Any] = []
    logits_TV = model(haystack.ids_T[None], use_cache=False, keep=layers).logits[0]
    gradient_LHTT = None
    if loss_spans:
        losses = []
        for span in loss_spans:
            targets = haystack.ids_T[span.start + 1 : span.stop + 1]
            rows = logits_TV[span.start : span.stop]
            losses.append(torch.nn.functional.cross_entropy(rows, targets))
        sum(losses, torch.zeros(())).backward()
        gradient_LHTT = torch.stack([layer[0].grad[0] for layer in layers])
    weights, q, k = (
        torch.stack([layer[part][0].detach() for layer in layers]) for part in range(3)
    )
    return Matrices(weights, q, k, gradient_LHTT, layers[0][3])


def _attention(
    module: Any, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, attention_mask: Any,
    scaling: float, keep: list[Any], **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    k_BHTD, v_BHTD = (repeat_groups(x, q_BHTD.shape[1]) for x in (k_BGTD, v_BGTD))
    scores = q_BHTD @ k_BHTD.transpose(2, 3) * scaling
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    if weights.requires_grad:
        weights.retain_grad()
    keep.append((weights, q_BHTD, k_BHTD, scaling))
    return (weights @ v_BHTD).transpose(1, 2).contiguous(), None


def lags(length: int) -> Tensor:
    """(T, T): t - j."""
    positions = torch.arange(length)
    return positions[:, None] - positions


def lag_histogram(values_LHTT: Tensor) -> Tensor:
    """(L, H, T): sums of a causal matrix over each of its diagonals."""
    length = values_LHTT.shape[-1]
    diagonals = [values_LHTT.diagonal(-d, -2, -1).sum(-1) for d in range(length)]
    return torch.stack(diagonals, dim=-1)
