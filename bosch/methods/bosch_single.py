"""The paper's ablation B-single: the mask of stage 1 of BOSCH alone.

Stage 1 puts ceil(rho G) groups of each layer on the window; where that is more than the budget, the
groups that did the most harm there are taken off again.
"""

from dataclasses import dataclass

from bosch.methods._interface import Context, Selection
from bosch.search import stages
from bosch.search.search import open_search
from bosch.search.settings import SearchSettings

searches = True


@dataclass(frozen=True)
class Settings(SearchSettings):
    """The paper's."""


def select(context: Context) -> Selection:
    kappa, layers_at_once = context.settings.kappa, 1
    with open_search(context) as search:
        search.announce({"stage 1": stages.plan_localizing(search, kappa, layers_at_once)})
        with search.until_ended():
            stages.localize_to_budget(search, kappa, layers_at_once)
        return search.finish()
