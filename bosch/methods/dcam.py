"""Distance-conditioned attention mass: the share of a head's attention that falls inside the
window.

Equations 7 and 8 of the paper. Rows of attention sum to 1, so the histogram over lags, normalized
and cumulated up to the window, is the mean over rows of their mass inside it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bosch.methods._examples import measure_each
from bosch.methods._interface import Context, Scores
from bosch.methods._statistics import add_up, attention_rows, exact_sum, per_layer


@dataclass(frozen=True)
class Settings:
    """There is nothing to set."""


def rank(context: Context) -> Scores:
    haystacks = context.calibration.haystacks

    def local_mass(q_HTD: Tensor, k_GTD: Tensor, scaling: float) -> Tensor:
        mass_H = torch.zeros(q_HTD.shape[0], dtype=torch.float64, device=q_HTD.device)
        for rows in attention_rows(q_HTD, k_GTD, scaling, context.chunk_elements):
            first, inside_CS = rows.inside(context.window_tokens)
            mass_H += exact_sum(rows.weights_HCS[..., first:] * inside_CS)
        return mass_H

    def measure(index: int) -> dict[str, Any]:
        ids_T = haystacks[index].ids_T
        mass_LH = per_layer(context, ids_T, local_mass)
        return {"local": mass_LH.tolist(), "rows": len(ids_T)}

    results = measure_each(context.folder, "dcam", len(haystacks), "examples", measure)
    num_rows = sum(result["rows"] for result in results)
    return Scores.of_heads(add_up(results, "local") / num_rows, context.num_groups, "local")
