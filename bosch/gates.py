"""Gates that learn, together with the weights, which groups keep full attention; and the mask they
end in. A gate is a number between 0 and 1: as everywhere, 1 is full attention and 0 the window.

ConSA's are hard-concrete (Louizos, Welling and Kingma, 2018): random numbers that are exactly 0 or
1 with some probability, and differentiable in their parameter alpha.

    s = sigmoid((log u - log(1 - u) + alpha) / BETA),   u uniform in (0, 1)
    z = clamp(s * (ZETA - GAMMA) + GAMMA, 0, 1)

An augmented Lagrangian holds the share of closed gates at the ratio (its equation 10):

    loss + linear * gap + quadratic * gap^2,     gap = expected share on the window - ratio

is minimized over weights and gates and maximized over the two multipliers, all in the same step.
The multipliers start at 0. While too few gates are closed, the linear one falls below 0 and pushes
gates to close; the quadratic one can only grow."""
# L layers, G groups a layer, C constraints, N gates in any shape, U units that have a gate each:
# (L, G) groups or (L, 1) layers

import math
from typing import Literal

import torch
from torch import Tensor, nn

from bosch.masks.formats import smallest
from bosch.masks.mask import num_windowed
from bosch.method import ParameterGroup

# What is chosen and where the ratio holds: groups over all layers, groups in each layer, or layers.
Granularity = Literal["head-all-layers", "head-per-layer", "layer"]

# ConSA's constants (its equation 7), constant through training.
BETA = 2 / 3
ZETA = 1.1
GAMMA = -0.1
START = 5.0  # alpha of every gate at first: open, P(z > 0) = 0.9986
WARMUP_SHARE = 0.3  # of the steps; ConSA's 300 of 1,000
FLOOR_SHARE = 0.1  # of the peak learning rate; ConSA's 3e-5 of 3e-4

# logit(1e-6) is -14: noise closer to 0 or 1 would only matter for gates with alpha beyond 14.
LEAST_NOISE = 1e-6

# P(z > 0) = sigmoid(alpha - SHIFT) and P(z < 1) = sigmoid(-alpha - SHIFT): mirror images.
SHIFT = BETA * math.log(-GAMMA / ZETA)


def sample_gates(alpha_N: Tensor, noise_N: Tensor) -> Tensor:
    """z of each gate, for noise uniform in (0, 1). Where z is 0 or 1, its gradient is 0."""
    logits_N = torch.logit(noise_N, eps=LEAST_NOISE) + alpha_N
    stretched_N = torch.sigmoid(logits_N / BETA) * (ZETA - GAMMA) + GAMMA
    return stretched_N.clamp(0, 1)


def share_open(alpha_N: Tensor) -> Tensor:
    """P(z > 0), which ConSA uses as E[z] (its equation 9). The true mean of z is lower."""
    return torch.sigmoid(alpha_N - SHIFT)


def mean_of_gates(alpha_N: Tensor, num_points: int = 512) -> Tensor:
    """The true E[z]: the average over the noise, by the midpoint rule."""
    noise_P = (torch.arange(num_points, device=alpha_N.device) + 0.5) / num_points
    return sample_gates(alpha_N[..., None], noise_P.to(alpha_N.dtype)).mean(-1)


class ConstrainedGates(nn.Module):
    """The gates of a model and their multipliers: everything that is learned besides the weights.

    They are in float32 and complete on every rank. They get no weight decay, and do not count in
    the norm by which the weights' gradients are clipped."""

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
        self.alpha_U = nn.Parameter(torch.full((num_layers, num_columns), START))
        self.linear_C = nn.Parameter(torch.zeros(num_constraints))
        self.quadratic_C = nn.Parameter(torch.zeros(num_constraints))

    def sample(self, step: int) -> Tensor:
        """z of every group in a step, (L, G). The noise is a function of seed and step: the same on
        every rank, in every micro-batch, when activations are recomputed, and after a kill."""
        # On the CPU: a GPU's generator gives other numbers, and gates would depend on the machine.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        noise_U = torch.rand(self.alpha_U.shape, generator=generator).to(self.alpha_U.device)
        return sample_gates(self.alpha_U, noise_U).expand(-1, self.num_groups)

    def window_share(self) -> Tensor:
        """1 - E[z] over the units of each constraint, (C,), with ConSA's E[z]."""
        open_U = share_open(self.alpha_U)
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
        # It is maximized over gap^2, which is never negative: without a cap it grows in each step.
        if self.quadratic_cap is not None:
            self.quadratic_C.clamp_(max=self.quadratic_cap)

    def table(self) -> list[list[float]]:
        """The values that rank the units. The lowest get the window."""
        table: list[list[float]] = self.alpha_U.tolist()
        return table

    def shown(self) -> Tensor:
        """Each gate from 0 to 1, for curves: P(z > 0)."""
        return share_open(self.alpha_U)

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """Figures for curves: means over the constraints, and the gap furthest from 0."""
        gap_C = self.window_share() - self.ratio
        return {
            "window_share": float(self.window_share().mean()),
            "mean_gate": float(mean_of_gates(self.alpha_U).mean()),
            "largest_gap": float(gap_C[gap_C.abs().argmax()]),
            "penalty": float(self.penalty()),
            "linear": float(self.linear_C.mean()),
            "quadratic": float(self.quadratic_C.mean()),
        }


class ScalarGates(nn.Module):
    """One number in [0, 1] for each unit, initially 1, with an L1 penalty: the control in ConSA's
    paper. Nothing ties them to a ratio; they only rank the units."""

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
        table: list[list[float]] = self.gate_U.tolist()
        return table

    def shown(self) -> Tensor:
        return self.gate_U

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        return {"mean_gate": float(self.gate_U.mean()), "penalty": float(self.penalty())}


class GateLearner:
    """Gates as a training loop trains them: the `Learner` of bosch/method.py."""

    def __init__(
        self,
        gates: ConstrainedGates | ScalarGates,
        groups: list[ParameterGroup],
        window_tokens: int,
        num_steps: int,
    ) -> None:
        self.module: nn.Module = gates
        self._gates, self._groups = gates, groups
        self.window_tokens, self.num_steps = window_tokens, num_steps

    def parameter_groups(self) -> list[ParameterGroup]:
        return self._groups

    def rate(self, done: int) -> float:
        """Linear warm-up, then cosine decay to the floor."""
        warmup = round(WARMUP_SHARE * self.num_steps)
        if done < warmup:
            return (done + 1) / warmup
        progress = (done - warmup) / max(1, self.num_steps - warmup)
        return FLOOR_SHARE + (1 - FLOOR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))

    def model_arguments(self, done: int) -> dict[str, object]:
        z_LG = self._gates.sample(done)
        arguments: dict[str, object] = {"bosch_gates": z_LG, "bosch_window": self.window_tokens}
        if self._gates.is_settled_at_the_ends:
            arguments["bosch_mask"] = branches_of(z_LG)
        return arguments

    def extra_loss(self) -> Tensor:
        return self._gates.penalty()

    def after_step(self, step: int) -> None:
        self._gates.after_step()

    def figures(self) -> dict[str, float]:
        rows = enumerate(self._gates.shown().tolist())
        layers = {f"layer_{layer:02d}": sum(row) / len(row) for layer, row in rows}
        return {f"gates/{name}": x for name, x in (self._gates.figures() | layers).items()}


def branches_of(z_LG: Tensor) -> list[list[int | None]]:
    """The branch that each group must compute: 1 full, 0 windowed, None both."""
    known = {0.0: 0, 1.0: 1}
    return [[known.get(value) for value in row] for row in z_LG.tolist()]


def lowest(
    table_U: list[list[float]], granularity: Granularity, ratio: float, seed: int
) -> tuple[list[tuple[int, int]], bool]:
    """The lowest values, as many as the ratio demands, and whether the seed broke a tie.

    ConSA's threshold meets the ratio only as closely as learning has converged: a gate with alpha
    between -4 and 0 is still open at times, which counts in the constraint, but is closed in the
    mask."""
    num_layers, num_columns = len(table_U), len(table_U[0])
    total = num_windowed(ratio, num_layers, num_columns)
    if granularity != "head-per-layer":
        units, tie = smallest(table_U, total, seed)
        return units, tie is not None

    def is_tie(ranked: list[tuple[int, int]], count: int) -> bool:
        """Whether the last of the first `count` units has the same value as the next one."""
        values = [table_U[layer][column] for layer, column in ranked]
        return 0 < count < len(values) and values[count - 1] == values[count]

    # Each layer gives equally many. The remainder comes from the layers with the lowest next value,
    # one each, so that the total is exact.
    ranked, _ = smallest(table_U, num_layers * num_columns, seed)
    rows = [[unit for unit in ranked if unit[0] == layer] for layer in range(num_layers)]
    count, rest = divmod(total, num_layers)
    next_ones = {row[count] for row in rows} if rest else set()
    order = [unit for unit in ranked if unit in next_ones]
    parts = [row[: count + (row[count] in order[:rest] if rest else 0)] for row in rows]
    drawn = is_tie(order, rest) or any(map(is_tie, rows, map(len, parts)))
    return [unit for part in parts for unit in part], drawn
