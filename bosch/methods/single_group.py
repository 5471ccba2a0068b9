"""Each group windowed alone: the drop of the answers' mean log-probability, the plain black-box
ranking.

No equation of attention is read: one prefill of every calibration text for each group, and one of
the dense model. A large drop is global; a negative one says that the window helps.
"""
# L layers, G groups a layer, T tokens, N answer tokens, D hidden size, V vocabulary

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bosch.calibration_file import Haystack
from bosch.methods._examples import measure_each
from bosch.methods._interface import Context, Scores, as_table


@dataclass(frozen=True)
class Settings:
    """There is nothing to set."""


def rank(context: Context) -> Scores:
    haystacks = context.calibration.haystacks
    shape = context.num_layers, context.num_groups

    def measure(index: int) -> dict[str, Any]:
        haystack, z = haystacks[index], [[1] * shape[1] for _ in range(shape[0])]
        dense = answer_log_probability(context.model, haystack, z, context.window_tokens)
        drops_LG = torch.zeros(shape, dtype=torch.float64)
        for layer in range(shape[0]):
            for group in range(shape[1]):
                z[layer][group] = 0
                value = answer_log_probability(context.model, haystack, z, context.window_tokens)
                drops_LG[layer, group] = dense - value
                z[layer][group] = 1
        return {"drops": drops_LG.tolist(), "questions": len(haystack.questions)}

    results = measure_each(context.folder, "single_group", len(haystacks), "examples", measure)
    drops_LG = torch.tensor([result["drops"] for result in results], dtype=torch.float64).sum(0)
    num_questions = sum(result["questions"] for result in results)
    return Scores(as_table(drops_LG / num_questions), "global")


@torch.no_grad()
def answer_log_probability(
    model: PreTrainedModel, haystack: Haystack, z: list[list[int]], window_tokens: int
) -> float:
    """The mean log-probability of each answer's tokens, summed over the questions of a text."""
    ids_BT = haystack.ids_T[None].to(model.device)
    hidden_TD = model.base_model(
        ids_BT, use_cache=False, bosch_mask=z, bosch_window=window_tokens
    ).last_hidden_state[0]
    total = 0.0
    for question in haystack.questions:
        rows, answer = question.predicting, question.answer
        log_probabilities_N = _log_probabilities(
            model, hidden_TD[rows.start : rows.stop], ids_BT[0, answer.start : answer.stop]
        )
        total += float(log_probabilities_N.double().mean())
    return total


def _log_probabilities(model: PreTrainedModel, hidden_ND: Tensor, answer_N: Tensor) -> Tensor:
    head: Any = model.get_output_embeddings()
    logits_NV = head(hidden_ND)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return logits_NV.log_softmax(-1).gather(1, answer_N[:, None])[:, 0]
