"""Gates as a training loop trains them: the `Learner` of bosch/method.py."""
# L layers, G groups a layer

import math
from dataclasses import dataclass

from torch import Tensor, nn

from bosch.gates.constraint import ConstrainedGates
from bosch.gates.scalar import ScalarGates
from bosch.method import ParameterGroup


@dataclass(frozen=True)
class RateCurve:
    """Linear warm-up, then cosine decay to the floor."""

    num_steps: int
    warmup_share: float = 0.3  # ConSA's 300 of 1,000 steps
    floor_share: float = 0.1  # ConSA's 3e-5 of 3e-4

    def __call__(self, done: int) -> float:
        """The learning rate of the next step, as a share of the peak."""
        warmup = round(self.warmup_share * self.num_steps)
        if done < warmup:
            return (done + 1) / warmup
        progress = (done - warmup) / max(1, self.num_steps - warmup)
        return self.floor_share + (1 - self.floor_share) * 0.5 * (1 + math.cos(math.pi * progress))


class GateLearner:
    """Trains gates together with the weights of a model."""

    def __init__(
        self,
        gates: ConstrainedGates | ScalarGates,
        groups: list[ParameterGroup],
        window_tokens: int,
        rate: RateCurve,
    ) -> None:
        self.module: nn.Module = gates
        self._gates = gates
        self.window_tokens, self.rate = window_tokens, rate
        self._groups = groups

    def parameter_groups(self) -> list[ParameterGroup]:
        return self._groups

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
        figures = self._gates.figures() | {
            f"layer_{layer:02d}": sum(row) / len(row)
            for layer, row in enumerate(self._gates.shown())
        }
        return {f"gates/{name}": value for name, value in figures.items()}


def branches_of(z_LG: Tensor) -> list[list[int | None]]:
    """The branch that each group must compute: 1 full, 0 windowed, None both."""
    known = {0.0: 0, 1.0: 1}
    return [[known.get(value) for value in row] for row in z_LG.tolist()]
