"""ConSA: gates that are learned with the weights, under the constraint that they meet the ratio.

Chen et al., arXiv 2606.18056. One hard-concrete gate a group, or a layer, mixes its full and its
windowed attention (bosch/hybrid/search_mode.py); an augmented Lagrangian drives the expected
share on the window to the ratio (bosch/gates/constraint.py); the lowest gates go on the window.

The paper leaves open how fast gates and multipliers learn. At the weights' rate (3e-4) nothing
moves within its 1,000 steps. On a convex toy of 28 x 8 gates, at ratios .25, .5 and .75 and four
seeds, gates at .1 and multipliers at .2 end within .012 of the ratio, and the chosen groups cost at
most 1.06 times the best choice; .2 and .2 end within .039, .1 and .1 within .090, .2 and .1 within
.054. With 300 steps instead of 1,000 no rates that were tried settle (.10 to .24 off), nor does a
ratio that rises over the first half help; so where tokens are few, steps are made of shorter
sequences. On earlier weights of the embedded tiny model, at .75, 307 steps of 1,024 tokens ended at
.902, and 1,000 of 256 tokens at .750; on its present ones the default, 614 steps of 512, at .750.
"""

from dataclasses import dataclass

from bosch.gates.constraint import ConstrainedGates
from bosch.methods._gates import GateSettings, learn
from bosch.methods._interface import Context, Selection

learns_from_tokens = True
reads_calibration = False


@dataclass(frozen=True)
class Settings(GateSettings):
    """Of learned masks."""

    gate_learning_rate: float = 0.1  # peak
    multiplier_learning_rate: float = 0.2  # peak
    quadratic_cap: float | None = None  # most of the quadratic multiplier, which only grows

    def __post_init__(self) -> None:
        super().__post_init__()
        self.above_0("gate_learning_rate", "multiplier_learning_rate")
        if self.quadratic_cap is not None and not self.quadratic_cap >= 0:
            raise ValueError(f"consa: quadratic_cap is {self.quadratic_cap}, it is at least 0.")


def select(context: Context) -> Selection:
    settings = context.settings
    gates = ConstrainedGates(
        context.num_layers,
        context.num_groups,
        settings.granularity,
        context.ratio,
        context.seed,
        settings.quadratic_cap,
    )
    rates = settings.gate_learning_rate, settings.multiplier_learning_rate
    return learn(context, gates, gates.parameter_groups(*rates))
