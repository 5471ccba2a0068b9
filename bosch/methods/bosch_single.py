"""The paper's ablation B-single: the mask of stage 1 of BOSCH alone.

Stage 1 puts ceil(rho G) groups of each layer on the window; where that is more than the budget, the
groups that did the most harm there are taken off again.
"""

from dataclasses import dataclass

from bosch.method import Inputs, MethodTraits, Selection
from bosch.search.optimizers._interface import mend
from bosch.search.settings import SearchSettings

traits = MethodTraits(searches=True)


@dataclass(frozen=True)
class Settings(SearchSettings):
    """The paper's."""


def select(inputs: Inputs) -> Selection:
    return localize(inputs, layers_at_once=1)


def localize(inputs: Inputs, layers_at_once: int) -> Selection:
    """Stage 1 over so many neighboring layers at once, and no other stage."""
    from bosch.search import stages  # imports torch
    from bosch.search.finish import finish
    from bosch.search.search import open_search

    kappa = inputs.settings.kappa
    with open_search(inputs) as search:
        search.announce({"stage 1": stages.plan_localizing(search, kappa, layers_at_once)})
        windowed = stages.groups_a_layer(search) * search.num_layers
        beyond = windowed != search.budget
        with search.until_ended():
            found = stages.localize_parts(search, kappa, layers_at_once, exact_values=beyond)
            if beyond:
                groups = search.all_groups()
                order = stages.most_local_first(found.guides[0], groups)
                bits = mend(search.bits(groups, search.z), search.budget, order)
                search.z = search.mask(groups, bits)
                search.evaluate(search.z, None, "to the budget")
        return finish(search)
