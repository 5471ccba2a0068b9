"""The paper's ablation B-multi: stage 1 of BOSCH over several layers at once, and no other stage.

As many neighboring layers as a subproblem of stage 3 may have, kappa evaluations for each; what is
beyond the budget is taken off again as in `bosch_single`.
"""

from dataclasses import dataclass

from bosch.methods._interface import Context, Selection
from bosch.search import stages
from bosch.search.search import open_search
from bosch.search.settings import PartSettings, check_optimizer

searches = True


@dataclass(frozen=True)
class Settings(PartSettings):
    """The paper's."""


def check(settings: Settings) -> None:
    check_optimizer(settings)


def select(context: Context) -> Selection:
    settings: Settings = context.settings
    kappa, layers_at_once = settings.kappa, settings.layers_at_once(context.num_groups)
    with open_search(context) as search:
        search.announce({"stage 1": stages.plan_localizing(search, kappa, layers_at_once)})
        with search.until_ended():
            stages.localize_to_budget(search, kappa, layers_at_once)
        return search.finish()
