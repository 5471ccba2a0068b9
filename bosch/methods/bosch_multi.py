"""The paper's ablation B-multi: stage 1 of BOSCH over several layers at once, and no other stage.

As many neighboring layers as a subproblem of stage 3 may have, kappa evaluations for each; what is
beyond the budget is taken off again as in `bosch_single`.
"""

from dataclasses import dataclass

from bosch.method import Context, Selection
from bosch.methods.bosch_single import localize
from bosch.search.settings import PartSettings, check_optimizer

searches = True
check = check_optimizer


@dataclass(frozen=True)
class Settings(PartSettings):
    """The paper's."""


def select(context: Context) -> Selection:
    return localize(context, context.settings.layers_at_once(context.num_groups))
