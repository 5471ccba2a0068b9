"""Checks on the loss: skips steps that are not finite, reports spikes, and says at the start
whether the model looks like the right one."""

import math
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from bosch.run.errors import UserError
from bosch.run.progress import say

MOST_SKIPPED_IN_A_ROW = 3  # then training ends
HISTORY_STEPS = 128  # OLMo-core's rule: a spike is more than 6 sigma above the mean of these
SIGMAS = 6.0


class TrainingFailedError(UserError):
    """Loss or gradient stays infinite or NaN."""


class Guards:
    """Decides whether the optimizer makes a step. Part of the checkpoint."""

    def __init__(self, spike: str = "log") -> None:
        self.spike = spike  # log: only report spikes; skip: skip their steps too
        self.skipped = 0  # all steps that were skipped
        self.in_a_row = 0  # latest steps skipped since they were not finite
        # Of the latest steps, spikes included, even skipped ones. Without these, a loss that stays
        # on a new level would be skipped for ever.
        self.losses: list[float] = []
        self.norms: list[float] = []

    def judge(self, step: int, loss: float, norm: float, sequences: Iterable[int]) -> str | None:
        """None: make the step. Else why not (`non-finite`, `spike`), for the metrics.

        Both numbers are sums over all ranks, so all ranks decide the same.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.skipped += 1
            self.in_a_row += 1
            batch = " ".join(map(str, sequences))
            say(f"step {step}: skipped, loss {loss} and gradient norm {norm}; sequences {batch}")
            if self.in_a_row >= MOST_SKIPPED_IN_A_ROW:
                raise TrainingFailedError(
                    f"loss or gradient was not finite in {self.in_a_row} steps in a row, the last "
                    f"at step {step} with the sequences {batch}. These steps were skipped. Check "
                    "these sequences, or lower train.peak_learning_rate."
                )
            return "non-finite"
        self.in_a_row = 0
        jumped = [
            f"{name} {value:.4g} after a mean of {statistics.fmean(history):.4g}"
            for name, value, history in zip(
                ("loss", "gradient norm"), (loss, norm), (self.losses, self.norms), strict=True
            )
            if is_spike(value, history)
        ]
        self.losses = [*self.losses, loss][-HISTORY_STEPS:]
        self.norms = [*self.norms, norm][-HISTORY_STEPS:]
        if jumped:
            say(f"step {step}: spike, {', '.join(jumped)}")
            if self.spike == "skip":
                self.skipped += 1
                return "spike"
        return None

    def state_dict(self) -> dict[str, object]:
        names = ("skipped", "in_a_row", "losses", "norms")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        for name, value in state_dict.items():
            setattr(self, name, value)


def is_spike(value: float, history: list[float]) -> bool:
    """Never without a full history, since the loss changes quickly in the first steps."""
    if len(history) < HISTORY_STEPS:
        return False
    return value > statistics.fmean(history) + SIGMAS * statistics.stdev(history)


# ----------------------------------------------------------------------------------- the first step


def describe_first_losses(hybrid: float, full: float | None, vocab_size: int) -> list[str]:
    """Log lines about the loss before training. `full`: that of the same model without windows."""
    guessing = math.log(vocab_size)
    without = "" if full is None else f", {full:.4f} with full attention in every group"
    lines = [f"step 0: loss {hybrid:.4f}{without}"]
    if (hybrid if full is None else full) > guessing:
        lines.append(
            f"step 0: warning: worse than guessing ({guessing:.2f}); weights, tokens and tokenizer "
            "may not belong together"
        )
    elif hybrid > guessing:
        lines.append(
            f"step 0: warning: worse than guessing ({guessing:.2f}) with the windows; the mask may "
            "have put the most important groups on the window"
        )
    return lines


@contextmanager
def without_windows(model: PreTrainedModel) -> Iterator[bool]:
    """Let a hybrid compute full attention in every group. Yields whether the model is a hybrid."""
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
