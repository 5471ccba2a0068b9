"""Answer-centric peak lag (APL): how far a head's strongest attention is from the last answer
token.

Equations 9 and 10 of the paper. With t* the last answer token of a question:

    lag = t* - argmax over j <= t* of a(t*, j),    s = 1 - min(1, median over questions of lag / W)

The arg-max needs no softmax, so one row of scores per question is enough. The median of an even
number of questions is the mean of the middle two."""

import torch
from torch import Tensor

from bosch.calibration import Haystack
from bosch.method import Inputs, MethodTraits, NoSettings, Scores
from bosch.methods._examples import Result, measure_haystacks
from bosch.methods._statistics import per_layer, single_rows

traits = MethodTraits(measures=True)
Settings = NoSettings


def score_groups(inputs: Inputs) -> Scores:
    def measure(haystack: Haystack) -> Result:
        last_tokens = [question.answer[-1] for question in haystack.questions]

        def peak_lags(q_HTD: Tensor, k_GTD: Tensor, scaling: float) -> Tensor:
            scores_HNS = single_rows(q_HTD, k_GTD, scaling, last_tokens)
            # The first tokens are no peak where the mask has a sink: windowed, the head still sees
            # them. Those within the window count, as they do without a sink.
            for row, position in enumerate(last_tokens):
                past = min(inputs.sink.num_visible, max(0, position - inputs.window_tokens + 1))
                scores_HNS[:, row, :past] = -torch.inf
            peaks_HN = scores_HNS.argmax(-1)
            return torch.tensor(last_tokens, device=peaks_HN.device) - peaks_HN

        return {"lags": per_layer(inputs, haystack.ids_T, peak_lags).tolist()}

    results = measure_haystacks(inputs, "apl", measure)
    lags_LHN = torch.cat([torch.tensor(result["lags"]) for result in results], dim=2)
    median_LH = lags_LHN.double().quantile(0.5, dim=2)
    local_LH = 1 - (median_LH / inputs.window_tokens).clamp_max(1)
    return Scores.of_heads(local_LH, inputs.num_groups, "local")
