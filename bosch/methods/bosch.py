"""BOSCH, the paper's three stages: black-box search by NOMAD on the share of calibration examples
answered right; ends with the best mask it scored.

What stands in the paper's text is computed, with the errors of its algorithms corrected: the sign
of the drop in stage 2, and a budget that is met exactly. The paper ends with stage 3's mask
(`keep_best` off).
"""

from dataclasses import dataclass

from bosch.methods._interface import Context, Selection
from bosch.search import stages
from bosch.search.search import open_search
from bosch.search.settings import StageSettings, check_optimizer

searches = True


@dataclass(frozen=True)
class Settings(StageSettings):
    """The paper's."""


def check(settings: Settings) -> None:
    check_optimizer(settings)


def select(context: Context) -> Selection:
    settings: Settings = context.settings
    with open_search(context) as search:
        search.announce(stages.plan_evaluations(search, settings))
        with search.until_ended():
            importance = stages.measure_importance(search, settings)
            ratios = stages.assign_ratios(search, settings, importance)
            stages.select_groups(search, settings, ratios, importance.guides)
            stages.polish(search, stages.plan_polish(search, settings))
        return search.finish()
