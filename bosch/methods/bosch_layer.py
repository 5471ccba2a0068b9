"""The paper's ablation B-layer: whole layers, chosen in one search of kappa x L evaluations."""

from dataclasses import dataclass

from bosch.method import Inputs, MethodTraits, Selection
from bosch.search.settings import SearchSettings

traits = MethodTraits(unit="layer", searches=True)


@dataclass(frozen=True)
class Settings(SearchSettings):
    """The paper's settings."""


def select(inputs: Inputs) -> Selection:
    from bosch.search.finish import finish  # imports torch
    from bosch.search.search import count_solving, open_search

    evaluations = inputs.settings.kappa * inputs.num_layers
    with open_search(inputs, "layer") as search:
        layers = search.whole_layers()
        planned = count_solving(len(layers), inputs.layer_budget, evaluations)
        search.announce({"layers": planned})
        with search.until_ended():
            search.solve("layers", layers, inputs.layer_budget, evaluations)
        return finish(search)
