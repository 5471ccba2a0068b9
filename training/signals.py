"""Ending well: a signal or a STOP file ends training after the step, and nobody outlives its
launcher. (That nobody waits for a dead rank is in bosch/run/ranks.py.)

    with Interruption(folder) as interruption:
        ...
        if reason := interruption.requested():    # the same answer on every rank
            save, and return

`accelerate launch` with one process leaves that process behind, unsignaled, when it is ended
itself; the kernel is asked to pass the end of the parent on as SIGTERM. With several processes it
passes SIGTERM on, and kills what is left after 30 seconds (TORCH_ELASTIC_SHUTDOWN_TIMEOUT changes
that).
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
STOP_NUMBER = 1_000  # above every signal's
# torchrun answers Ctrl-C by a SIGINT of its own to ranks that had the terminal's already.
SAME_CTRL_C_SECONDS = 2.0
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
ENDS = "training ends after this step, and saves; Ctrl-C once more ends it at once"
# What accelerate and torchrun leave in the environment of what they start. Other parents, a shell
# for one, may well end before a run that was started with nohup.
LAUNCHER_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")


class Interruption:
    """From `with` on, SIGTERM and SIGINT are requests. A second Ctrl-C interrupts at once."""

    def __init__(self, folder: Path) -> None:
        """folder: of the stage; a STOP file may lie in it or in the run's folder above."""
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
            if os.getppid() != parent:  # it ended before the kernel knew
                self._signal = signal.SIGTERM
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def requested(self) -> str | None:
        """Why training should end now, or None. Every rank calls this, after each step."""
        wish = self._signal
        if self._ranks.rank == 0 and any(path.exists() for path in self._stop_files):
            wish = STOP_NUMBER
        wish = max(self._ranks.gather(wish))
        if wish < STOP_NUMBER:
            return signal.Signals(wish).name if wish else None
        if self._ranks.rank == 0:
            for path in self._stop_files:
                path.unlink(missing_ok=True)  # obeyed: the same command then goes on
        return f"a {STOP} file"

    def _request(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signal:
            self._since = now
            if self._ranks.rank == 0:  # not `say`: a signal may come in the midst of a print
                os.write(2, f"{signal.Signals(number).name}: {ENDS}\n".encode())
        elif number == signal.SIGINT and now > self._since + SAME_CTRL_C_SECONDS:
            raise KeyboardInterrupt
        self._signal = self._signal or number
