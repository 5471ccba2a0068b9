"""Settings of the methods that search. A method's own Settings add fields or change defaults. A
field with the name of a MaskConfig field takes its value. This file does not import torch."""

from dataclasses import dataclass
from importlib.util import find_spec

from bosch.config import MaskConfig, at_least
from bosch.plugins import list_plugins, suggest
from bosch.run.errors import UserError
from bosch.run.fingerprint import speed_only
from bosch.search.objective import WEIGHTS, Value, rounded


@dataclass(frozen=True)
class Accelerations:
    """Ways to the same mask with less work. Each can be switched off, to verify that.

    Cached hidden states equal recomputed ones bit for bit. Answer rows computed alone differ from
    whole layers by rounding, and values are rounded to 1e-4."""

    prefixes: bool = True  # start at the lowest layer in which a mask differs from earlier ones
    answer_rows: bool = True  # in the top layer, compute only the rows of the answers
    memo: bool = True  # never score a mask twice, not even in another run
    early_end: bool = True  # stop evaluating a mask that cannot exceed its threshold
    memory_gb: float | None = None  # for cached states; None: half of a GPU's free memory, else 1


# What accelerated values are compared with.
NO_ACCELERATIONS = Accelerations(
    prefixes=False, answer_rows=False, memo=False, early_end=False, memory_gb=0.0
)


@dataclass(frozen=True)
class SearchSettings:
    """Settings of every search."""

    # Evaluations per layer. A subproblem with no more candidates than that is enumerated.
    kappa: int = MaskConfig.kappa
    # How masks are scored, on the calibration answers: accuracy, probability, logprob,
    # accuracy+probability or accuracy+logprob.
    objective: str = "accuracy"
    optimizer: str = "nomad"  # a file of bosch/search/optimizers
    alpha: float = MaskConfig.alpha  # penalty for missing the quota, in NOMAD's loss
    gamma: float = MaskConfig.gamma  # headroom of the normalized score above the dense model
    # End with the best evaluated mask that meets the ratio. False: with the last stage's mask, as
    # in the paper, even if stage 1 evaluated a better one.
    keep_best: bool = True
    # Masks that the optimizer `guided` proposes at once, for ranks to share. It changes the course
    # of the search; the number of ranks does not.
    masks_at_once: int = 1
    max_evaluations: int | None = None  # stop after so many, with the best mask; None: as planned
    max_hours: float | None = None  # stop after so many hours, with the best mask
    accelerations: Accelerations = speed_only(Accelerations())

    def __post_init__(self) -> None:
        optimizers = list_plugins("bosch.search.optimizers")
        for name, known in (("objective", tuple(WEIGHTS)), ("optimizer", optimizers)):
            if (value := getattr(self, name)) not in known:
                problem = f"--{name} {value}: no such {name}; {suggest(value, known)}"
                raise UserError(f"{problem} In a run it is --mask.options {name}=VALUE.")
        at_least(1, self, "", "kappa", "masks_at_once")
        at_least(2, self, "", "max_evaluations")  # the dense model and the fully windowed one
        at_least(0, self, "", "alpha", "gamma", "max_hours")
        at_least(0, self.accelerations, "accelerations", "memory_gb")

    @property
    def breaks_ties(self) -> bool:
        """Whether log-probability decides between masks of the same value: accuracy has only as
        many values as there are questions. In the search as published the first of equals wins."""
        return self.objective == "accuracy" and self.optimizer not in ("nomad", "one_plus_one")

    def standing(self, value: Value) -> tuple[float, float]:
        """By which exact values are compared."""
        log = value.log_probability if self.breaks_ties else None
        return value.value, rounded(log or 0.0)


def check_optimizer(settings: SearchSettings) -> None:
    """Refuse, before work begins, an optimizer whose package is missing. Searches that may turn out
    small enough to enumerate do not call this."""
    if settings.optimizer == "nomad" and find_spec("PyNomad") is None:
        problem = "NOMAD is not installed: pip install PyNomadBBO"
        remedy = "--optimizer swap, in a run --mask.options optimizer=swap, which needs no package"
        raise UserError(f"{problem}, or use {remedy}.")


@dataclass(frozen=True)
class PartSettings(SearchSettings):
    """Settings of a search over several layers at once."""

    # Layers per subproblem; None: max(1, 32 // groups).
    max_layers: int | None = MaskConfig.max_layers
    # Groups per subproblem. The default is the most that NOMAD's quadratic model takes.
    max_variables: int = MaskConfig.max_variables

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "", "max_layers", "max_variables")

    def layers_at_once(self, num_groups: int) -> int:
        most = self.max_layers or max(1, 32 // num_groups)  # in the paper 4 layers of 8 groups
        return min(most, max(1, self.max_variables // num_groups))


@dataclass(frozen=True)
class StageSettings(PartSettings):
    """Settings of the paper's three stages."""

    # Ratios that stage 2 may give to a layer.
    ratio_buckets: tuple[float, ...] = MaskConfig.ratio_buckets
