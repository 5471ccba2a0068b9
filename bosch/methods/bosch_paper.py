"""BOSCH as published: three stages in search of the mask that answers most calibration examples.

It follows the paper's text and corrects errors in its algorithms: the sign of the drop in stage 2,
and a budget that is met exactly. As in the paper it ends with the mask of stage 3, even if it
evaluated a better one (`keep_best` ends with that).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bosch.method import Inputs, MethodTraits, Selection, Table
from bosch.search.settings import StageSettings, check_optimizer

traits = MethodTraits(searches=True)
check = check_optimizer


@dataclass(frozen=True)
class Settings(StageSettings):
    """The paper's settings."""

    keep_best: bool = False  # end with the best evaluated mask that meets the budget


def select(inputs: Inputs) -> Selection:
    return run_stages(inputs)


def run_stages(
    inputs: Inputs, num_rankings: int = 0, make_guides: Callable[[], Sequence[Table]] = lambda: ()
) -> Selection:
    """Run the stages. In stage 3, optimizers that keep the quota start from the guides' masks."""
    from bosch.search import stages  # imports torch
    from bosch.search.finish import finish
    from bosch.search.search import open_search

    settings: StageSettings = inputs.settings
    with open_search(inputs) as search:
        search.announce(stages.count_evaluations(search, settings, num_rankings))
        with search.until_ended():
            guides = make_guides()
            importance = stages.measure_importance(search, settings)
            ratios = stages.assign_ratios(search, settings, importance)
            stages.select_groups(search, settings, ratios, [*guides, *importance.guides])
            stages.polish(search, stages.count_polish(search, settings, num_rankings))
        return finish(search)
