"""Asks a NOMAD process for masks and tells it their losses; what goes wrong in there ends here."""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
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


def check_installed() -> None:
    if find_spec("PyNomad") is None:
        raise ValueError(
            "NOMAD is not installed: pip install PyNomadBBO, or search with --optimizer swap, "
            "which needs nothing."
        )


def minimize(
    loss_of: Callable[[Bits], float],
    start: Bits,
    max_evaluations: int,
    seed: int,
    options: tuple[str, ...] = (),
) -> str | None:
    """Run NOMAD once, with its default options but for those given. What ended it before its time,
    or None.

    With several ranks, NOMAD runs on the first and all evaluate what it asks for.
    """
    parameters = [*_parameters(len(start), max_evaluations, seed), *options]
    child = _Child(start, parameters) if is_first() else None
    try:
        while True:
            said = agree(child.listen() if child else None)
            if said[0] != "ask":
                return str(said[1]) if said[1] else None
            loss = loss_of(tuple(int(bit) for bit in said[1]))
            if child:
                child.tell(loss)
    finally:
        if child:
            child.end()


class _Child:
    """The process, and the pipes to it."""

    def __init__(self, start: Bits, parameters: list[str]) -> None:
        # A session of its own: Ctrl-C is for the search, which ends the child.
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.answers, self.questions = self.process.stdin, self.process.stdout
        self.unread = b""
        self._send(json.dumps({"start": start, "parameters": parameters}))

    def tell(self, loss: float) -> None:
        self._send(f"{float(loss):.17g}")

    def listen(self) -> tuple[str, str]:
        """("ask", bits), or ("end", why): "" where NOMAD came to its own end."""
        while b"\n" not in self.unread:
            with selectors.DefaultSelector() as selector:
                selector.register(self.questions, selectors.EVENT_READ)
                if not selector.select(HUNG_SECONDS):
                    return "end", f"asked nothing for {HUNG_SECONDS:g} s"
            received = os.read(self.questions.fileno(), 65_536)
            if not received:
                return "end", _describe_end(self.process.wait())
            self.unread += received
        line, _, self.unread = self.unread.partition(b"\n")
        word, _, rest = line.decode().partition(" ")
        if word == "ask":
            return "ask", rest
        return "end", "" if word == "done" else rest

    def end(self) -> None:
        self.process.kill()
        for pipe in (self.answers, self.questions):
            with suppress(BrokenPipeError):
                pipe.close()
        self.process.wait()

    def _send(self, line: str) -> None:
        with suppress(BrokenPipeError):  # it has ended, which `listen` will notice
            self.answers.write(line.encode() + b"\n")
            self.answers.flush()


def _parameters(num_variables: int, max_evaluations: int, seed: int) -> list[str]:
    """The paper's: NOMAD's defaults. Each is one that NOMAD knows, with a value it takes."""
    parameters: dict[str, Any] = {
        "DIMENSION": num_variables,
        "BB_INPUT_TYPE": "* B",
        "BB_OUTPUT_TYPE": "OBJ",
        "MAX_BB_EVAL": max_evaluations,
        "MAX_EVAL": LOOKUPS_PER_EVALUATION * max_evaluations,
        "DISPLAY_DEGREE": 0,
        "SEED": seed % SEEDS,
    }
    return [f"{name} {value}" for name, value in parameters.items()]


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    return f"was ended by {signal.Signals(-code).name}"
