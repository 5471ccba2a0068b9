"""What is watched: numbers that are no numbers, losses that jump, and at the first step whether the
model is the one that was meant."""

import math
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from bosch.run.errors import UserError
from bosch.run.progress import say

MOST_SKIPPED_IN_A_ROW = 3  # the next attempt would meet the same numbers
HISTORY_STEPS = 128  # OLMo-core's rule: a spike is more than 6 sigma above the mean of these
SIGMAS = 6.0


class TrainingFailedError(UserError):
    """Training cannot go on: its numbers are no numbers."""


class Guards:
    """Judges each step before the optimizer makes it. A part of the checkpoint."""

    def __init__(self, spike: str = "log") -> None:
        self.spike = spike  # log, or skip: the step of a spike is not made
        self.skipped = 0  # steps in all
        self.in_a_row = 0
        # Of the latest steps. Spikes count, made or not: without them a loss that stays on a new
        # level would be skipped for ever.
        self.losses: list[float] = []
        self.norms: list[float] = []

    def judge(self, step: int, loss: float, norm: float, sequences: Iterable[int]) -> str | None:
        """None: make the step. Else why not (`non-finite`, `spike`), for the metrics.

        Both numbers are sums over all ranks, so that every rank decides the same.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.skipped += 1
            self.in_a_row += 1
            batch = " ".join(map(str, sequences))
            say(f"step {step}: skipped, loss {loss} and gradient norm {norm}; sequences {batch}")
            if self.in_a_row >= MOST_SKIPPED_IN_A_ROW:
                raise TrainingFailedError(
                    f"loss or gradient was not finite in {self.in_a_row} steps in a row, the last "
                    f"at step {step} on the sequences {batch}. No such step was made; look at "
                    "these sequences, or train with a lower train.peak_learning_rate."
                )
            return "non-finite"
        self.in_a_row = 0
        jumped = [
            f"{name} {value:.4g} against {statistics.fmean(history):.4g} before"
            for name, value, history in zip(
                ("loss", "gradient norm"), (loss, norm), (self.losses, self.norms), strict=True
            )
            if is_spike(value, history)
        ]
        self.losses = [*self.losses, loss][-HISTORY_STEPS:]
        self.norms = [*self.norms, norm][-HISTORY_STEPS:]
        if jumped:
            say(f"step {step}: a spike, {', '.join(jumped)}")
            if self.spike == "skip":
                self.skipped += 1
                return "spike"
        return None

    def state_dict(self) -> dict[str, Any]:
        names = ("skipped", "in_a_row", "losses", "norms")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self, name, value)


def is_spike(value: float, history: list[float]) -> bool:
    """Judged only by a full history: the first steps fall and rise steeply."""
    if len(history) < HISTORY_STEPS:
        return False
    return value > statistics.fmean(history) + SIGMAS * statistics.stdev(history)


# ----------------------------------------------------------------------------------- the first step


def describe_first_losses(hybrid: float, full: float | None, vocab_size: int) -> list[str]:
    """What the untrained model's losses tell. `full`: of the same model without its windows."""
    guessing = math.log(vocab_size)
    beside = "" if full is None else f", and {full:.4f} with full attention in every group"
    lines = [f"step 0: loss {hybrid:.4f}{beside}"]
    if (hybrid if full is None else full) > guessing:
        lines.append(
            f"step 0: that is worse than guessing ({guessing:.2f}): weights, tokens and tokenizer "
            "may not belong together"
        )
    elif hybrid > guessing:
        lines.append(
            f"step 0: with its windows the model is worse than guessing ({guessing:.2f}); the mask "
            "has cut what it needs most"
        )
    return lines


@contextmanager
def without_windows(model: Any) -> Iterator[bool]:
    """A hybrid computes full attention in every group meanwhile. False: it has no windows."""
    hybrid = getattr(model.config, "bosch", None)
    if hybrid is None:
        yield False
        return
    window = hybrid["window"]
    hybrid["window"] = model.config.max_position_embeddings
    try:
        yield True
    finally:
        hybrid["window"] = window
