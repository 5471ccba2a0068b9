"""BOSCH with what its review found better: layers judged by whole-layer probes, groups by swaps
from a static ranking, a last search across layers, and a smoother objective.

It may spend as many evaluations as `bosch`: the probes and rankings are fewer than stage 1 takes
there, and the last search gets the rest, or kappa if that is more.
"""

from dataclasses import dataclass
from typing import Literal

from bosch.methods._interface import Context, Selection
from bosch.search import stages
from bosch.search.rankings import GuidedSettings, check_guides, rank_statically, read_start
from bosch.search.search import open_search
from bosch.search.settings import StageSettings

searches = True


@dataclass(frozen=True)
class Settings(GuidedSettings, StageSettings):
    """Those of a search with a start, and what differs from the paper's stages."""

    importance: Literal["stage1", "whole_layer"] = "whole_layer"  # how layers are judged
    # Evaluations a layer of the last search, across layers; None: what stage 1 of the paper leaves.
    polish: int | None = None


def check(settings: Settings) -> None:
    check_guides(settings)


def select(context: Context) -> Selection:
    settings: Settings = context.settings
    num_rankings = len(settings.rankings)
    start = read_start(context, settings.start)
    with open_search(context) as search:
        search.announce(stages.plan_evaluations(search, settings, num_rankings))
        with search.until_ended():
            guides = [*start, *rank_statically(context, settings.rankings)]
            importance = stages.measure_importance(search, settings)
            ratios = stages.assign_ratios(search, settings, importance)
            stages.select_groups(search, settings, ratios, [*guides, *importance.guides])
            stages.polish(search, stages.plan_polish(search, settings, num_rankings))
        return search.finish()
