"""BOSCH as published: three stages in search of the mask that answers most calibration examples.

It follows the paper's text and corrects errors in its algorithms: the sign of the drop in stage 2,
and a ratio that is met exactly. As in the paper it ends with the mask of stage 3, even if it
evaluated a better one (`keep_best` ends with that)."""

from dataclasses import dataclass

from bosch.method import Inputs, MethodTraits, Selection
from bosch.search.settings import StageSettings, check_optimizer

traits = MethodTraits(searches=True)
check = check_optimizer


@dataclass(frozen=True)
class Settings(StageSettings):
    keep_best: bool = False  # end with the best evaluated mask that meets the ratio


def select(inputs: Inputs) -> Selection:
    from bosch.search import stages  # imports torch
    from bosch.search.finish import announce, finish
    from bosch.search.optimizers._interface import WITH_PENALTY
    from bosch.search.search import begin_search

    settings = inputs.settings
    search = begin_search(inputs)
    announce(search, stages.count_evaluations(search, settings))
    with search.until_ended():
        ties, guide = stages.localize_parts(
            search,
            settings.kappa,
            layers_at_once=1,
            # Optimizers that keep the quota start stage 3 from the harm that stage 1 finds.
            exact_values=settings.optimizer not in WITH_PENALTY,
        )
        ratios = stages.give_ratios(search, settings, ties)
        stages.choose_groups(search, settings, ratios, guide)
    return finish(search)
