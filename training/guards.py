"""What skips a step, and what ends a training early.

Guards: a step with an infinite loss is not made; spikes are reported.

Interruption: a signal or a STOP file ends training after the current step. When `accelerate launch`
with one process is ended, it does not signal that process, so we ask the kernel for a SIGTERM when
the parent ends. With several it passes SIGTERM on, and kills those that still run after 30 seconds
(TORCH_ELASTIC_SHUTDOWN_TIMEOUT changes that).
"""

import ctypes
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from bosch.run.dist import Ranks
from bosch.run.errors import UserError
from bosch.run.progress import say

MOST_SKIPPED_IN_A_ROW = 3  # then training ends
HISTORY_STEPS = 128  # OLMo-core's rule: a spike is more than 6 sigma above the mean of these
SIGMAS = 6.0

STOP = "STOP"
STOP_NUMBER = 1_000  # larger than any signal's number
# On Ctrl-C ranks get SIGINT twice: from the terminal and from torchrun.
SAME_CTRL_C_SECONDS = 2.0
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
ENDS = "training saves and ends after this step; press Ctrl-C again to end it at once"
# Set by accelerate and torchrun for the processes they start. Other parents, such as a shell, may
# end before a run that was started with nohup.
LAUNCHER_VARIABLES = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}


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
        """None: make the step. Else why not (`non-finite`, `spike`), for the metrics. Both numbers
        are sums over all ranks, so all ranks decide the same."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.skipped += 1
            self.in_a_row += 1
            batch = " ".join(map(str, sequences))
            say(f"step {step}: skipped, loss {loss} and gradient norm {norm}; sequences {batch}")
            if self.in_a_row >= MOST_SKIPPED_IN_A_ROW:
                raise UserError(
                    f"loss or gradient was not finite in {self.in_a_row} steps in a row, the last "
                    f"at step {step} with the sequences {batch}. These steps were skipped. Check "
                    "these sequences, or lower train.peak_learning_rate."
                )
            return "non-finite"
        self.in_a_row = 0
        jumped = []
        judged = (("loss", loss, self.losses), ("gradient norm", norm, self.norms))
        for name, value, history in judged:
            # Never without a full history, since the loss changes quickly in the first steps.
            if len(history) == HISTORY_STEPS:
                mean = statistics.fmean(history)
                if value > mean + SIGMAS * statistics.stdev(history):
                    jumped.append(f"{name} {value:.4g} after a mean of {mean:.4g}")
        # After the judgment, or a spike would hide itself in the mean.
        self.losses = [*self.losses, loss][-HISTORY_STEPS:]
        self.norms = [*self.norms, norm][-HISTORY_STEPS:]
        if jumped:
            say(f"step {step}: spike, {', '.join(jumped)}")
        skips = bool(jumped) and self.spike == "skip"
        self.skipped += skips
        return "spike" if skips else None

    def state_dict(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "spike"}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        vars(self).update(state_dict)


class Interruption:
    """Inside `with`, SIGTERM and SIGINT only ask to stop. A second Ctrl-C interrupts at once. A
    STOP file may be in the stage's folder or in its parent, the run folder."""

    def __init__(self, folder: Path) -> None:
        self._stop_files = (folder / STOP, folder.parent / STOP)
        self._ranks = Ranks.current()
        self._signal = 0
        self._since = 0.0  # when the signal came
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self._request)
        if sys.platform == "linux" and LAUNCHER_VARIABLES & os.environ.keys():
            parent = os.getppid()
            ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:  # the parent ended before prctl took effect
                self._signal = signal.SIGTERM
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def requested(self) -> str | None:
        """Why training should end now, or None. Every rank calls this, after each step."""
        number, is_first = self._signal, self._ranks.rank == 0
        if is_first and any(path.exists() for path in self._stop_files):
            number = STOP_NUMBER
        # The largest of all ranks' numbers, since a signal may have reached only some of them.
        number = max(self._ranks.gather(number))
        if number < STOP_NUMBER:
            return signal.Signals(number).name if number else None
        for path in self._stop_files if is_first else ():
            path.unlink(missing_ok=True)  # so that the same command can resume
        return f"a {STOP} file"

    def _request(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if not self._signal:
            self._signal, self._since = number, now
            if self._ranks.rank == 0:  # not `say`: the signal may interrupt a print
                os.write(2, f"{signal.Signals(number).name}: {ENDS}\n".encode())
        elif number == signal.SIGINT and now > self._since + SAME_CTRL_C_SECONDS:
            raise KeyboardInterrupt
