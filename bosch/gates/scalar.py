"""Gates that are plain numbers, pulled down by an L1 term: the control that ConSA's paper compares
with. Nothing makes them agree with a ratio; they only rank the units.
"""
# L layers, G groups a layer, U units: what has a gate of its own, (L, G) groups or (L, 1) layers

from typing import Any

import torch
from torch import Tensor, nn


class ScalarGates(nn.Module):
    """One number in [0, 1] for each unit, 1 at first."""

    is_settled_at_the_ends = False  # a gate of 1 must feel what less of it would do
    threshold = None  # none is meant to tell open from closed

    def __init__(self, num_layers: int, num_columns: int, num_groups: int, weight: float) -> None:
        super().__init__()
        self.num_groups, self.weight = num_groups, weight
        self.gate_U = nn.Parameter(torch.ones(num_layers, num_columns))

    def sample(self, step: int) -> Tensor:
        """z of every group, (L, G): the same in every step."""
        return self.gate_U.expand(-1, self.num_groups)

    def penalty(self) -> Tensor:
        return self.weight * self.gate_U.abs().mean()

    def parameter_groups(self, gate_rate: float) -> list[dict[str, Any]]:
        return [{"params": [self.gate_U], "lr": gate_rate, "weight_decay": 0.0}]

    @torch.no_grad()
    def after_step(self) -> None:
        """Back into the range. Clamped in the forward pass, a gate at 1 would never come down."""
        self.gate_U.clamp_(0, 1)

    def table(self) -> list[list[float]]:
        """What units are ranked by. The lowest go on the window."""
        table: list[list[float]] = self.gate_U.tolist()
        return table

    def shown(self) -> list[list[float]]:
        return self.table()

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        return {"mean_gate": float(self.gate_U.mean()), "penalty": float(self.penalty())}
