"""BOSCH: probes of every group, their order over all layers, and guided swaps across layers.

Three stages as in the paper, each with a signal: stage 1 asks what every group is worth, stage 2
ranks the groups of all layers and so gives each layer its share, stage 3 swaps groups, those first
that promise most by the outcomes of each haystack so far. `bosch_paper` is the search as published.
"""

import math
from dataclasses import dataclass

from bosch.config import above_0
from bosch.method import Inputs, MethodTraits, Selection
from bosch.methods._guided import GuidedSettings, check_guides, guides_of

traits = MethodTraits(searches=True)
check = check_guides


@dataclass(frozen=True)
class Settings(GuidedSettings):
    optimizer: str = "guided"  # a file of bosch/search/optimizers
    rankings: tuple[str, ...] = ()  # ranking methods to start from, in addition to the probes
    probed: float = 1 / 3  # share of the haystacks that stage 1 reads
    # Stage 3 tries this share of kappa masks per layer.
    effort: float = 1 / 3
    # End with the first mask that answers as well as the dense model. On easy settings that is the
    # one that the probes choose.
    until_dense: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        above_0(self, "", "probed", most=1)
        above_0(self, "", "effort")


def select(inputs: Inputs) -> Selection:
    from bosch.search import probes  # imports torch
    from bosch.search.finish import announce, finish
    from bosch.search.search import count_solving, open_search

    settings, make_guides = inputs.settings, guides_of(inputs)
    with open_search(inputs) as search:
        groups, guides = search.all_groups(), []
        swaps = max(2, round(settings.effort * settings.kappa * search.num_layers))
        swaps = count_solving(len(groups), search.num_windowed, swaps)
        is_choice = swaps > 1  # at a ratio of 0 or 1 there is none
        announce(search, {"stage 1": len(groups), "stage 3": swaps} if is_choice else {"mask": 1})
        with search.until_ended():
            if is_choice:
                worth = probes.probe_groups(search, settings.probed)
                guides = probes.rank_groups(search, [worth, *make_guides()])
            enough = search.anchors.dense.value if settings.until_dense else math.inf
            search.solve("stage 3", groups, search.num_windowed, swaps, guides, enough=enough)
        return finish(search)
