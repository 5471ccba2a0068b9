"""The control for BOSCH: swaps over all groups from the best static ranking, without stages.

It gets as many evaluations as `bosch_paper` plans with the same kappa."""

from bosch.method import Inputs, MethodTraits, Selection
from bosch.methods._guided import GuidedSettings, check_rankings, rankings_of
from bosch.search.settings import StageSettings

traits = MethodTraits(searches=True, keeps_full=True)
Settings = GuidedSettings


def check(settings: Settings) -> None:
    check_rankings(settings, "rankings", settings.rankings)


def select(inputs: Inputs) -> Selection:
    from bosch.search import stages  # imports torch
    from bosch.search.finish import announce, finish
    from bosch.search.search import begin_search

    settings = inputs.settings
    search = begin_search(inputs)
    planned = stages.count_evaluations(search, StageSettings(kappa=settings.kappa))
    # A ranking costs about as much as an evaluation, and the comparison is at equal cost.
    evaluations = max(1, sum(planned.values()) - len(settings.rankings))
    announce(search, {"swaps": evaluations})
    with search.until_ended():
        groups, guides = search.groups, rankings_of(inputs)
        search.solve("swaps", groups, search.num_windowed, evaluations, guides)
    return finish(search)
