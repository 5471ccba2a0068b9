"""The paper's ablation B-layer: whole layers, chosen in one search of kappa x L evaluations."""

from bosch.method import Inputs, MethodTraits, Selection
from bosch.search.settings import SearchSettings

traits = MethodTraits(unit="layer", searches=True)
Settings = SearchSettings


def select(inputs: Inputs) -> Selection:
    from bosch.search.finish import announce, finish  # imports torch
    from bosch.search.search import begin_search, count_solving

    evaluations, windowed = inputs.settings.kappa * inputs.num_layers, inputs.num_windowed_layers
    groups = range(inputs.num_groups)
    # A variable is a whole layer: its groups share one decision.
    layers = [tuple((layer, group) for group in groups) for layer in range(inputs.num_layers)]
    search = begin_search(inputs, "layer")
    announce(search, {"layers": count_solving(len(layers), windowed, evaluations)})
    with search.until_ended():
        search.solve("layers", layers, windowed, evaluations)
    return finish(search)
