"""RULER's string match: whether answers occur in a prediction as substrings, ignoring case."""

import re
from collections.abc import Sequence

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f]")


def clean_prediction(prediction: str) -> str:
    """The prediction as RULER compares it: control characters become line breaks."""
    return CONTROL_CHARACTERS.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """The share of the answers that occur in the prediction."""
    return sum(matches(prediction, answers)) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if one of the answers occurs in the prediction."""
    return max(matches(prediction, answers))


def matches(prediction: str, answers: Sequence[str]) -> list[float]:
    text = clean_prediction(prediction).lower()
    return [1.0 if answer.lower() in text else 0.0 for answer in answers]
