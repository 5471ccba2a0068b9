"""Clean stops: a signal or a STOP file ends training after the current step, and ranks do not
outlive their launcher. (bosch/run/ranks.py sees to it that no rank waits for a dead one.)

    with Interruption(folder) as interruption:
        ...
        if reason := interruption.requested():    # the same answer on every rank
            save, and return

When `accelerate launch` with one process is ended, it does not signal that process. So we ask the
kernel for a SIGTERM when the parent ends. With several processes it passes SIGTERM on, and kills
those that still run after 30 seconds (TORCH_ELASTIC_SHUTDOWN_TIMEOUT changes that).
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, Self

from bosch.run.group import Group

STOP = "STOP"
STOP_NUMBER = 1_000  # larger than any signal's number
# On Ctrl-C ranks get SIGINT twice: from the terminal and from torchrun.
SAME_CTRL_C_SECONDS = 2.0
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
ENDS = "training saves and ends after this step; press Ctrl-C again to end it at once"
# Set by accelerate and torchrun for the processes they start. Other parents, such as a shell, may
# end before a run that was started with nohup.
LAUNCHER_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")


class Interruption:
    """Inside `with`, SIGTERM and SIGINT only ask to stop. A second Ctrl-C interrupts at once."""

    def __init__(self, folder: Path) -> None:
        """folder: the stage's. A STOP file may be in it or in its parent, the run folder."""
        self._stop_files = (folder / STOP, folder.parent / STOP)
        self._ranks = Group.current()
        self._signal = 0
        self._since = 0.0  # when the signal came
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self._request)
        if sys.platform == "linux" and any(name in os.environ for name in LAUNCHER_VARIABLES):
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
        number = self._signal
        if self._ranks.rank == 0 and any(path.exists() for path in self._stop_files):
            number = STOP_NUMBER
        number = max(self._ranks.gather(number))
        if number < STOP_NUMBER:
            return signal.Signals(number).name if number else None
        if self._ranks.rank == 0:
            for path in self._stop_files:
                path.unlink(missing_ok=True)  # so that the same command can resume
        return f"a {STOP} file"

    def _request(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signal:
            self._since = now
            if self._ranks.rank == 0:  # not `say`: the signal may interrupt a print
                os.write(2, f"{signal.Signals(number).name}: {ENDS}\n".encode())
        elif number == signal.SIGINT and now > self._since + SAME_CTRL_C_SECONDS:
            raise KeyboardInterrupt
        self._signal = self._signal or number
