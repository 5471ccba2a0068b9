"""Retrieval heads: the share of answer tokens that a head copies from the needle.

    s = share of answer tokens x[t + 1] with  j* = argmax over j of a(t, j)  in the needle
                                         and  x[j*] = x[t + 1]

That is, a head copies an answer token if its strongest attention, in the row that predicts the
token, is on that same token inside the needle (Wu et al. 2024, "Retrieval Head Mechanistically
Explains Long-Context Factuality"). They count over greedy generation; here the right answer is
given, which is the same wherever the model answers right. Answers that stand nowhere in the text do
not count, as what follows it. A large share is global."""
# L layers, H query heads, G kv heads, T tokens, S keys, D head size, N answer tokens

import torch
from torch import Tensor

from bosch.calibration import Haystack, Question
from bosch.method import Inputs, MethodTraits, NoSettings, Scores
from bosch.methods._examples import Result, measure_haystacks
from bosch.methods._statistics import add_up, per_layer, single_rows
from bosch.run.errors import UserError

traits = MethodTraits(measures=True)
Settings = NoSettings


def score_groups(inputs: Inputs) -> Scores:
    num_heads = inputs.model_info.num_query_heads
    questions = [q for haystack in inputs.calibration.haystacks for q in haystack.questions]
    num_tokens = sum(len(question.answer) for question in filter(has_needle, questions))
    if not num_tokens:
        raise UserError(
            "retrieval_head needs questions whose answers stand in their text, and the calibration "
            "set has none: add needles, as niah_single_1, to its tasks."
        )

    def measure(haystack: Haystack) -> Result:
        if not any(map(has_needle, haystack.questions)):
            return {"copied": torch.zeros(inputs.num_layers, num_heads).tolist()}
        rows, copies = [], []  # that predict answer tokens, and their tokens in the needle
        positions_T = torch.arange(len(haystack.ids_T))
        for question in filter(has_needle, haystack.questions):
            start, stop = question.needle.start, question.needle.stop
            in_needle_T = (positions_T >= start) & (positions_T < stop)
            for row in question.predicting:
                rows.append(row)
                copies.append(in_needle_T & (haystack.ids_T == haystack.ids_T[row + 1]))
        copies_NT = torch.stack(copies)

        def copied(q_HTD: Tensor, k_GTD: Tensor, scaling: float) -> Tensor:
            peaks_HN = single_rows(q_HTD, k_GTD, scaling, rows).argmax(-1).cpu()
            return copies_NT[torch.arange(len(rows)), peaks_HN].sum(-1)

        return {"copied": per_layer(inputs, haystack.ids_T, copied).tolist()}

    results = measure_haystacks(inputs, "retrieval_head", measure)
    share_LH = add_up(results, "copied") / num_tokens
    return Scores.of_heads(share_LH, inputs.num_groups, "global")


def has_needle(question: Question) -> bool:
    return len(question.needle) > 0
