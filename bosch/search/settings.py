"""What the methods that search leave to the user. A method's own Settings add to these, or change a
default. Fields with the names of MaskConfig's take its values.
"""

from dataclasses import dataclass
from typing import Literal

from bosch.config import MaskConfig, at_least
from bosch.plugins import list_plugins, suggest
from bosch.run.errors import UserError
from bosch.run.fingerprint import speed_only
from bosch.search.objective import check_objective
from bosch.search.optimizers._nomad_process import check_installed
from bosch.search.scorer import Accelerations
from bosch.search.subproblems import MAX_VARIABLES


@dataclass(frozen=True)
class SearchSettings:
    """Of every search."""

    # Evaluations a layer; a subproblem with no more candidates is enumerated.
    kappa: int = MaskConfig.kappa
    # What a mask is judged by: accuracy, probability, logprob, accuracy+probability,
    # accuracy+logprob (of the answers).
    objective: str = "accuracy"
    optimizer: str = "nomad"  # a file of bosch/search/optimizers
    alpha: float = MaskConfig.alpha  # penalty for missing the quota, in the loss that NOMAD sees
    gamma: float = MaskConfig.gamma  # headroom of the normalized score above the dense model's
    # End with the best mask evaluated that meets the budget; False: with the last stage's mask, as
    # the paper, though stage 1 may have passed through a better one.
    keep_best: bool = True
    nomad_early_end: bool = False  # end evaluations for NOMAD early; its models then see bounds
    max_evaluations: int | None = None  # end with the best mask after so many; None: as planned
    max_hours: float | None = None  # the same after so much time
    accelerations: Accelerations = speed_only(Accelerations())

    def __post_init__(self) -> None:
        check_objective(self.objective)
        optimizers = list_plugins("bosch.search.optimizers")
        if self.optimizer not in optimizers:
            raise UserError(
                f"--optimizer {self.optimizer}: no such optimizer; "
                f"{suggest(self.optimizer, optimizers)}"
            )
        at_least(1, self, "", "kappa")
        at_least(2, self, "", "max_evaluations")  # the dense model and the fully windowed one
        at_least(0, self, "", "alpha", "gamma", "max_hours")


def check_optimizer(settings: SearchSettings) -> None:
    """Refuse, before work begins, an optimizer whose package is missing. Searches whose candidates
    may all be few enough to try do not ask.
    """
    if settings.optimizer == "nomad":
        check_installed()


@dataclass(frozen=True)
class PartSettings(SearchSettings):
    """Of a search over several layers at once."""

    max_layers: int | None = MaskConfig.max_layers  # of a subproblem; None: max(1, 32 // groups)
    # Of a subproblem; NOMAD's quadratic model takes no more.
    max_variables: int = MaskConfig.max_variables

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "", "max_layers", "max_variables")

    def layers_at_once(self, num_groups: int) -> int:
        most = max(1, MAX_VARIABLES // num_groups) if self.max_layers is None else self.max_layers
        return min(most, max(1, self.max_variables // num_groups))


@dataclass(frozen=True)
class StageSettings(PartSettings):
    """Of the paper's three stages."""

    # What stage 2 may give a layer.
    ratio_buckets: tuple[float, ...] = MaskConfig.ratio_buckets
    # How stage 1 finds what a layer costs. stage1: as in the paper, localized from the top down to
    # the ratio, what is found kept. whole_layer: each layer wholly on the window, all others full,
    # judged by the answers' log-probability; an evaluation a layer.
    importance: Literal["stage1", "whole_layer"] = "stage1"
    # A last search over all groups, which swaps across layers: evaluations a layer. 0: none. None:
    # what is left of the evaluations that stage 1 of the paper takes.
    polish: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "", "polish")
