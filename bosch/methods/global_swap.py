"""The control for BOSCH: no layers, no stages; swaps over all groups from the best static ranking.

It gets as many evaluations as `bosch` plans with the same kappa.
"""

from dataclasses import dataclass
from pathlib import Path

from bosch.methods._interface import Context, Selection
from bosch.search import stages
from bosch.search.rankings import (
    STARTS,
    check_rankings,
    check_start,
    rank_statically,
    read_start,
)
from bosch.search.search import open_search
from bosch.search.settings import SearchSettings, StageSettings, check_optimizer

searches = True


@dataclass(frozen=True)
class Settings(SearchSettings):
    """Those that differ from the paper's."""

    objective: str = "accuracy+probability"
    optimizer: str = "swap"
    rankings: tuple[str, ...] = STARTS  # methods whose choice it may start from
    start: Path | None = None  # a mask.json to start from as well


def check(settings: Settings) -> None:
    check_optimizer(settings)
    check_rankings(settings.rankings)
    check_start(settings.start)


def select(context: Context) -> Selection:
    settings: Settings = context.settings
    start = read_start(context, settings.start)
    with open_search(context) as search:
        plan = stages.plan_evaluations(search, StageSettings(kappa=settings.kappa))
        evaluations = sum(plan.values()) - len(settings.rankings)
        search.announce({"swaps": evaluations})
        with search.until_ended():
            guides = [*start, *rank_statically(context, settings.rankings)]
            groups = search.all_groups()
            stages.solve_guided(search, "swaps", groups, search.budget, evaluations, guides)
        return search.finish()
