"""The paper's ablation B-multi: only stage 1 of BOSCH, over several layers at once.

Each part has as many neighboring layers as a subproblem of stage 3 may have, and kappa evaluations
per layer. Groups beyond the ratio are made full again as in `bosch_single`."""

from bosch.method import Inputs, MethodTraits, Selection
from bosch.methods.bosch_single import localize
from bosch.search.settings import PartSettings, check_optimizer

traits = MethodTraits(searches=True)
check = check_optimizer
Settings = PartSettings


def select(inputs: Inputs) -> Selection:
    return localize(inputs, inputs.settings.layers_at_once(inputs.num_groups))
