"""Gates that are plain numbers with an L1 penalty: the control in ConSA's paper. Nothing ties them
to a ratio; they only rank the units.
"""
# L layers, G groups a layer, U units, which have one gate each: (L, G) groups or (L, 1) layers

import torch
from torch import Tensor, nn

from bosch.method import ParameterGroup


class ScalarGates(nn.Module):
    """One number in [0, 1] for each unit, initially 1."""

    is_settled_at_the_ends = False  # a gate at 1 needs a gradient to come down
    threshold = None  # there is no threshold between open and closed

    def __init__(self, num_layers: int, num_columns: int, num_groups: int, weight: float) -> None:
        super().__init__()
        self.num_groups, self.weight = num_groups, weight
        self.gate_U = nn.Parameter(torch.ones(num_layers, num_columns))

    def sample(self, step: int) -> Tensor:
        """z of every group, (L, G), the same in every step."""
        return self.gate_U.expand(-1, self.num_groups)

    def penalty(self) -> Tensor:
        return self.weight * self.gate_U.abs().mean()

    def parameter_groups(self, gate_rate: float) -> list[ParameterGroup]:
        return [{"params": [self.gate_U], "lr": gate_rate, "weight_decay": 0.0}]

    @torch.no_grad()
    def after_step(self) -> None:
        """Clamp to the range. Clamping in the forward pass would keep a gate at 1 forever."""
        self.gate_U.clamp_(0, 1)

    def table(self) -> list[list[float]]:
        """The values that rank the units. The lowest get the window."""
        table: list[list[float]] = self.gate_U.tolist()
        return table

    def shown(self) -> list[list[float]]:
        return self.table()

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        return {"mean_gate": float(self.gate_U.mean()), "penalty": float(self.penalty())}
