"""The control for BOSCH: no layers, no stages; swaps over all groups from the best static ranking.

It gets as many evaluations as `bosch` plans with the same kappa.
"""

from dataclasses import dataclass

from bosch.methods._interface import Context, Selection
from bosch.search import stages
from bosch.search.rankings import GuidedSettings, check_guides, rank_statically, read_start
from bosch.search.search import open_search
from bosch.search.settings import StageSettings

searches = True


@dataclass(frozen=True)
class Settings(GuidedSettings):
    """Those of a search with a start."""


def check(settings: Settings) -> None:
    check_guides(settings)


def select(context: Context) -> Selection:
    settings: Settings = context.settings
    start = read_start(context, settings.start)
    with open_search(context) as search:
        plan = stages.plan_evaluations(search, StageSettings(kappa=settings.kappa))
        evaluations = max(1, sum(plan.values()) - len(settings.rankings))
        search.announce({"swaps": evaluations})
        with search.until_ended():
            guides = [*start, *rank_statically(context, settings.rankings)]
            groups = search.all_groups()
            stages.solve_guided(search, "swaps", groups, search.budget, evaluations, guides)
        return search.finish()
