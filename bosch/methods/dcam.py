"""Distance-conditioned attention mass (DCAM): the share of a head's attention inside the window.

Equations 7 and 8 of the paper, with a(t, j) what row t gives to key j:

    M(d) = sum over t of a(t, t - d),    s = (M(0) + ... + M(W - 1)) / (M(0) + M(1) + ...)

Rows of attention sum to 1, so this equals the mean over rows of their mass inside the window. Where
the mask has a sink, its first tokens count as inside too; as a constant, it stands for the first.
"""

import torch
from torch import Tensor

from bosch.method import Inputs, MethodTraits, NoSettings, Scores
from bosch.methods._statistics import attention_rows, exact_sum, mean_over_rows

traits = MethodTraits(measures=True)
Settings = NoSettings


def score_groups(inputs: Inputs) -> Scores:
    def local_mass(q_HTD: Tensor, k_GTD: Tensor, scaling: float) -> Tensor:
        mass_H = torch.zeros(q_HTD.shape[0], dtype=torch.float64, device=q_HTD.device)
        for rows in attention_rows(q_HTD, k_GTD, scaling, inputs.chunk_elements):
            first, inside_CS = rows.inside(inputs.window_tokens)
            mass_H += exact_sum(rows.weights_HCS[..., first:] * inside_CS)
            # The first keys once they have left the window; until then they are counted above.
            weights_HCN = rows.weights_HCS[..., : inputs.sink.num_visible]
            mass_H += exact_sum(weights_HCN * rows.past(inputs.window_tokens, weights_HCN.shape[2]))
        return mass_H

    share_LH = mean_over_rows(inputs, "dcam", "local", local_mass)
    return Scores.of_heads(share_LH, inputs.num_groups, "local")
