"""Hard-concrete gates with the constraint that a given share of them closes: ConSA's augmented
Lagrangian.

    loss + linear * gap + quadratic * gap^2,     gap = expected share on the window - ratio

is minimized over weights and gates and maximized over the two multipliers, all in the same step
(equation 10). The multipliers start at 0. While too few gates are closed, the linear one falls
below 0 and pushes gates to close; the quadratic one can only grow.
"""
# L layers, G groups a layer, C constraints, U units, which have one gate each: (L, G) groups or
# (L, 1) layers

from typing import Literal

import torch
from torch import Tensor, nn

from bosch.gates import hard_concrete
from bosch.method import ParameterGroup

# What is chosen and where the ratio holds: groups over all layers, groups in each layer, or layers.
Granularity = Literal["head-all-layers", "head-per-layer", "layer"]


class ConstrainedGates(nn.Module):
    """The gates of a model and their multipliers: everything that is learned besides the weights.

    They are in float32 and complete on every rank. They get no weight decay, and do not count in
    the norm by which the weights' gradients are clipped.
    """

    is_settled_at_the_ends = True  # a gate at 0 or 1 gets no gradient from the model
    threshold = 0.0  # ConSA closes what is at or below it (equation 11)

    def __init__(
        self,
        num_layers: int,
        num_groups: int,
        granularity: Granularity,
        ratio: float,
        seed: int,
        quadratic_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.num_groups, self.ratio, self.seed = num_groups, ratio, seed
        self.quadratic_cap = quadratic_cap
        num_columns = 1 if granularity == "layer" else num_groups
        # With one constraint per layer, the penalties of the layers add up.
        num_constraints = num_layers if granularity == "head-per-layer" else 1
        self.alpha_U = nn.Parameter(torch.full((num_layers, num_columns), hard_concrete.START))
        self.linear_C = nn.Parameter(torch.zeros(num_constraints))
        self.quadratic_C = nn.Parameter(torch.zeros(num_constraints))

    def sample(self, step: int) -> Tensor:
        """z of every group in a step, (L, G)."""
        noise_U = hard_concrete.draw_noise(self.seed, step, tuple(self.alpha_U.shape))
        z_U = hard_concrete.sample(self.alpha_U, noise_U.to(self.alpha_U.device))
        return z_U.expand(-1, self.num_groups)

    def window_share(self) -> Tensor:
        """1 - E[z] over the units of each constraint, (C,), with ConSA's E[z]."""
        open_U = hard_concrete.share_open(self.alpha_U)
        return 1 - open_U.reshape(len(self.linear_C), -1).mean(1)

    def penalty(self) -> Tensor:
        gap_C = self.window_share() - self.ratio
        return (self.linear_C * gap_C + self.quadratic_C * gap_C**2).sum()

    def parameter_groups(self, gate_rate: float, multiplier_rate: float) -> list[ParameterGroup]:
        """For torch's optimizers. The multipliers are maximized."""
        multipliers = [self.linear_C, self.quadratic_C]
        return [
            {"params": [self.alpha_U], "lr": gate_rate, "weight_decay": 0.0},
            {"params": multipliers, "lr": multiplier_rate, "weight_decay": 0.0, "maximize": True},
        ]

    @torch.no_grad()
    def after_step(self) -> None:
        if self.quadratic_cap is not None:
            self.quadratic_C.clamp_(max=self.quadratic_cap)

    def table(self) -> list[list[float]]:
        """The values that rank the units: alpha. The lowest get the window."""
        table: list[list[float]] = self.alpha_U.tolist()
        return table

    @torch.no_grad()
    def shown(self) -> list[list[float]]:
        """Each gate from 0 to 1, for curves: P(z > 0)."""
        shown: list[list[float]] = hard_concrete.share_open(self.alpha_U).tolist()
        return shown

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """Figures for curves: means over the constraints, and the gap furthest from 0."""
        gap_C = self.window_share() - self.ratio
        return {
            "window_share": float(self.window_share().mean()),
            "mean_gate": float(hard_concrete.mean(self.alpha_U).mean()),
            "largest_gap": float(gap_C[gap_C.abs().argmax()]),
            "penalty": float(self.penalty()),
            "linear": float(self.linear_C.mean()),
            "quadratic": float(self.quadratic_C.mean()),
        }
