"""BOSCH, the paper's three stages: black-box search by NOMAD on the share of calibration examples
answered right; ends with the best mask it scored.

What stands in the paper's text is computed, with the errors of its algorithms corrected: the sign
of the drop in stage 2, and a budget that is met exactly. The paper ends with stage 3's mask
(`keep_best` off).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bosch.method import Inputs, MethodTraits, Selection, Table
from bosch.search.settings import StageSettings, check_optimizer

traits = MethodTraits(searches=True)
check = check_optimizer


@dataclass(frozen=True)
class Settings(StageSettings):
    """The paper's."""


def select(inputs: Inputs) -> Selection:
    return run_stages(inputs)


def run_stages(
    inputs: Inputs, num_rankings: int = 0, make_guides: Callable[[], Sequence[Table]] = lambda: ()
) -> Selection:
    """The stages; in stage 3 optimizers that keep the quota start from what guides choose."""
    from bosch.search import stages  # imports torch
    from bosch.search.finish import finish
    from bosch.search.search import open_search

    settings: StageSettings = inputs.settings
    with open_search(inputs) as search:
        search.announce(stages.plan_evaluations(search, settings, num_rankings))
        with search.until_ended():
            guides = make_guides()
            importance = stages.measure_importance(search, settings)
            ratios = stages.assign_ratios(search, settings, importance)
            stages.select_groups(search, settings, ratios, [*guides, *importance.guides])
            stages.polish(search, stages.plan_polish(search, settings, num_rankings))
        return finish(search)
