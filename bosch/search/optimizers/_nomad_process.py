"""Asks a NOMAD process for masks and tells it their losses; what goes wrong in there ends here.

Through the pipe go first the start and NOMAD's parameters, then for each `("ask", bits)` its loss;
the last thing it says is `("end", what ended it)`, None if it came to its own end.
"""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from bosch.run.group import agree, is_first
from bosch.search.optimizers._interface import Bits

CHILD = Path(__file__).with_name("_nomad_child.py")
# Points NOMAD may look up for each it may evaluate: near the end of a search it proposes little but
# masks it knows. Counted, so that the same run ends at the same point on any machine.
LOOKUPS_PER_EVALUATION = 10
HUNG_SECONDS = 1_800.0  # without a question; NOMAD's own models take seconds
SEEDS = 1_000_000  # NOMAD rolls its generator as often as the seed says


def minimize(
    loss_of: Callable[[Bits], float], start: Bits, max_evaluations: int, seed: int
) -> str | None:
    """Run NOMAD once, with its default options as in the paper. What ended it before its time, or
    None. With several ranks it runs on the first, and all evaluate what it asks for.
    """
    parameters = {
        "DIMENSION": len(start),
        "BB_INPUT_TYPE": "* B",
        "BB_OUTPUT_TYPE": "OBJ",
        "MAX_BB_EVAL": max_evaluations,
        "MAX_EVAL": LOOKUPS_PER_EVALUATION * max_evaluations,
        "DISPLAY_DEGREE": 0,
        "SEED": seed % SEEDS,
    }
    child = _Child() if is_first() else None
    try:
        if child:
            child.tell((start, [f"{name} {value}" for name, value in parameters.items()]))
        while True:
            word, said = agree(child.listen() if child else None)
            if word == "end":
                ended_by: str | None = said
                return ended_by
            loss = loss_of(said)
            if child:
                child.tell(loss)
    finally:
        if child:
            child.end()


class _Child:
    """The process, and the pipe to it."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,  # closed when this process ends, whatever ends it
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the search, which ends the child
        )
        theirs.close()

    def tell(self, what: Any) -> None:
        with suppress(OSError):  # it has ended, which `listen` will notice
            self.pipe.send(what)

    def listen(self) -> tuple[str, Any]:
        try:
            if not self.pipe.poll(HUNG_SECONDS):
                return "end", f"asked nothing for {HUNG_SECONDS:g} s"
            said: tuple[str, Any] = self.pipe.recv()
            return said
        except (EOFError, OSError):
            code = self.process.wait()
        if code >= 0:
            return "end", f"ended with code {code}"
        return "end", f"was ended by {signal.Signals(-code).name}"

    def end(self) -> None:
        self.process.kill()
        self.pipe.close()
        self.process.communicate()
