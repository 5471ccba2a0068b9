"""The paper's ablation B-layer: whole layers, all chosen in one run of kappa x L evaluations."""

from dataclasses import dataclass

from bosch.method import Context, Selection
from bosch.search.finish import finish
from bosch.search.search import open_search, plan_solving
from bosch.search.settings import SearchSettings

searches = True
unit = "layer"


@dataclass(frozen=True)
class Settings(SearchSettings):
    """The paper's."""


def select(context: Context) -> Selection:
    evaluations = context.settings.kappa * context.num_layers
    with open_search(context, "layer") as search:
        layers = search.whole_layers()
        planned = plan_solving(len(layers), context.layer_budget, evaluations)
        search.announce({"layers": planned})
        with search.until_ended():
            search.solve("layers", layers, context.layer_budget, evaluations)
        return finish(search)
