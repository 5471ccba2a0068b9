"""What a search maximizes: the objectives, and the result of one evaluation.

Every evaluation returns accuracy, mean answer probability and mean answer log-probability; the
objective says which of them are compared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bosch.run.errors import UserError

# Weights of a question's accuracy (0 or 1), answer probability (the product over its tokens) and
# answer log-probability in each objective.
WEIGHTS: dict[str, tuple[float, float, float]] = {
    "accuracy": (1, 0, 0),
    "probability": (0, 1, 0),
    "logprob": (0, 0, 1),
    "accuracy+probability": (0.5, 0.5, 0),
    "accuracy+logprob": (0.5, 0, 0.5),
}


class Means(NamedTuple):
    """Means over the questions of one haystack, or of all."""

    accuracy: float
    probability: float
    log_probability: float


Outcome = Mapping[int, Means]  # of a mask, by the number of the haystack


@dataclass(frozen=True)
class Value:
    """The result of evaluating a mask."""

    value: float  # of the objective, rounded to 1e-4; larger is better
    exact: bool  # False: stopped early; `value` is then an upper bound, at most the threshold
    # Means over all questions; None if it stopped early.
    accuracy: float | None
    probability: float | None
    log_probability: float | None
    # In the order in which haystacks were read; those of a bound are the first ones.
    haystacks: Outcome = field(default_factory=dict)


class SearchEnded(Exception):  # noqa: N818  # not an error
    """--max-evaluations or --max-hours is reached; the best exact mask so far is the result."""


def weighted(name: str, accuracy: float, probability: float, log_probability: float) -> float:
    """An objective from its three parts, as means over questions or for one question."""
    by_accuracy, by_probability, by_log = WEIGHTS[name]
    return by_accuracy * accuracy + by_probability * probability + by_log * log_probability


def rounded(value: float) -> float:
    """To 1e-4: kernels may differ below that."""
    return round(value, 4) + 0.0  # no -0.0


@dataclass(frozen=True)
class Anchors:
    """The two scores between which equation 2 normalizes."""

    dense: Value  # the full-attention model
    low: float  # a, the score of the model with all groups on the window
    high: float  # b = (1 + gamma) S(1): headroom above the dense model

    def normalized(self, score: float) -> float:
        """Equation 2."""
        return (score - self.low) / (self.high - self.low)


def anchors_between(dense: Value, windowed: Value, gamma: float) -> Anchors:
    """From the values of both ends. Refuses a calibration set on which there is nothing to choose.
    gamma: headroom above the dense model."""
    # The value alone does not tell: a log-probability of 0 is perfect, and a lower one can rank.
    if not dense.value and not dense.accuracy:
        raise UserError(
            "The dense model answers none of the calibration questions, so they cannot rank masks. "
            "Build an easier set (shorter contexts, niah_single tasks), check that the set was "
            "made with this model's tokenizer, or rank by the answers' probability: --objective "
            "logprob, in `bosch recover` --mask.options objective=logprob."
        )
    if windowed.value >= dense.value:
        raise UserError(
            f"With all groups on the window the model scores {windowed.value:g}, no less than the "
            f"dense model ({dense.value:g}): this calibration set does not need long context. "
            "Build one with longer contexts, or use a smaller window."
        )
    # Log-probabilities are negative; the headroom still lies above.
    return Anchors(dense, windowed.value, rounded(dense.value + gamma * abs(dense.value)))
