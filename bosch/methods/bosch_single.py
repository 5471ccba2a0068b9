"""The paper's ablation B-single: only stage 1 of BOSCH, one layer at a time.

Stage 1 windows ceil(rho G) groups of each layer. If that exceeds the ratio, the groups whose
windowing did the most harm are made full again."""

from bosch.masks.mask import num_windowed
from bosch.method import Inputs, MethodTraits, Selection
from bosch.search.settings import SearchSettings

traits = MethodTraits(searches=True)
Settings = SearchSettings


def select(inputs: Inputs) -> Selection:
    return localize(inputs, layers_at_once=1)


def localize(inputs: Inputs, layers_at_once: int) -> Selection:
    """Only stage 1, over `layers_at_once` neighboring layers at a time."""
    from bosch.search import stages  # imports torch
    from bosch.search.finish import announce, finish
    from bosch.search.search import begin_search

    kappa = inputs.settings.kappa
    search = begin_search(inputs)
    announce(search, {"stage 1": stages.count_localizing(search, kappa, layers_at_once)})
    parts = stages.cut_into(range(search.num_layers), layers_at_once)
    by_part = [num_windowed(inputs.ratio, len(part), search.num_groups) for part in parts]
    exceeds = sum(by_part) != search.num_windowed  # each part's share is rounded up
    # The harm of each group is needed, and so exact values, only where some get full again.
    with search.until_ended():
        _, guide = stages.localize_parts(search, kappa, layers_at_once, exact_values=exceeds)
        if exceeds:
            search.meet_ratio(guide)
            search.score([search.z], part="to the ratio", num_windowed=search.num_windowed)
    return finish(search)
