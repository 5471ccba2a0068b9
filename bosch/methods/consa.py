"""ConSA: gates learned together with the weights, under the constraint that they meet the ratio.

Chen et al., arXiv 2606.18056, equations 3 and 10. With a gate z per group or layer:

    out = z * full attention + (1 - z) * attention in the window      bosch/attention/search_mode.py
    min over weights and gates, max over multipliers a, b, of
        loss + a * gap + b * gap^2,   gap = expected share on the window - ratio    bosch/gates.py

Gates are hard-concrete: random numbers, often exactly 0 or 1. The lowest get the window.

The paper does not give the learning rates of gates and multipliers. At the weights' rate (3e-4)
nothing moves within its 1,000 steps. On a convex toy of 28 x 8 gates, at ratios .25, .5 and .75 and
four seeds, gates at .1 and multipliers at .2 end within .012 of the ratio (other rates: .039 to
.090), and the chosen groups cost at most 1.06 times the best choice. With 300 steps no rates
settle, so where tokens are few, steps use shorter sequences."""

from dataclasses import dataclass

from bosch.config import above_0, at_least
from bosch.gates import ConstrainedGates
from bosch.method import Inputs, MethodTraits, Selection
from bosch.methods._gates import GateSettings, learn

traits = MethodTraits(reads_calibration=False, learns_from_tokens=True)


@dataclass(frozen=True)
class Settings(GateSettings):
    gate_learning_rate: float = 0.1  # peak
    multiplier_learning_rate: float = 0.2  # peak
    quadratic_cap: float | None = None  # upper limit of the quadratic multiplier, which only grows

    def __post_init__(self) -> None:
        super().__post_init__()
        above_0(self, "", "gate_learning_rate", "multiplier_learning_rate")
        at_least(0, self, "", "quadratic_cap")


def select(inputs: Inputs) -> Selection:
    settings = inputs.settings
    gates = ConstrainedGates(
        inputs.num_layers,
        inputs.num_groups,
        settings.granularity,
        inputs.ratio,
        inputs.seed,
        settings.quadratic_cap,
    )
    groups = gates.parameter_groups(settings.gate_learning_rate, settings.multiplier_learning_rate)
    return learn(inputs, gates, groups)
