"""The paper's optimizer: NOMAD on the loss with a penalty for missing the quota, started from the
first start without repair.

NOMAD may leave the quota; the result is the best of its masks that meets it. NOMAD builds no models
above 49 variables, so the (1+1) evolutionary algorithm is used there, as in the paper.

NOMAD runs in its own process (_nomad_child.py says why), whose failures end here. We send it the
start and NOMAD's parameters, then the loss for each `("ask", assignment)`. Its last message is
`("end", reason)`; the reason is None if it ended normally."""

import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from bosch.run.dist import Ranks
from bosch.search.optimizers import one_plus_one
from bosch.search.optimizers._interface import Proposals, Trials
from bosch.search.settings import check_optimizer

MOST_VARIABLES = 49  # for which NOMAD builds a quadratic model
CHILD = Path(__file__).with_name("_nomad_child.py")
# Points that NOMAD may look up per evaluation: near the end of a search it mostly proposes known
# masks. A count rather than a time limit, so that a run ends at the same point on any machine.
LOOKUPS_PER_EVALUATION = 10
HUNG_SECONDS = 1_800.0  # without a request; NOMAD's own models take seconds


def search(trials: Trials) -> Proposals:
    """With NOMAD's default options, as in the paper. With several ranks NOMAD runs on rank 0, and
    all ranks evaluate its masks."""
    problem = trials.problem
    num_variables = len(problem.variables)
    if num_variables > MOST_VARIABLES:
        trials.notes.append(
            f"{num_variables} variables exceed the {MOST_VARIABLES} for which NOMAD builds "
            "models; using one_plus_one, the paper's fallback"
        )
        yield from one_plus_one.search(trials)
        return
    check_optimizer(problem.settings)
    parameters = {
        "DIMENSION": num_variables,
        "BB_INPUT_TYPE": "* B",
        "BB_OUTPUT_TYPE": "OBJ",
        "MAX_BB_EVAL": trials.left,
        "MAX_EVAL": LOOKUPS_PER_EVALUATION * trials.left,  # with those that NOMAD knows already
        "DISPLAY_DEGREE": 0,
        "SEED": problem.seed,
    }
    ranks = Ranks.current()
    child = _Child() if ranks.rank == 0 else None
    try:
        if child:
            child.send((problem.starts[0], [f"{name} {x}" for name, x in parameters.items()]))
        while True:
            # NOMAD runs beside rank 0 only; the ranks score its masks together.
            message: Any = child.receive() if child else None
            # Rank 0's message for all, so that every rank scores the same mask, or ends.
            kind, content = ranks.agree(message)
            if kind == "end":
                break
            yield [content], None  # exact values: its models are fitted to all of them
            if child:
                child.send(problem.loss(content, trials.table[content].value))
    finally:  # also where the loop ends this, because no evaluations are left
        if child:
            child.end()
    if content:
        trials.reproducible = False
        trials.notes.append(
            f"NOMAD {content}: the last {trials.left} of {problem.max_evaluations} evaluations of "
            "this subproblem are skipped and its best mask so far is used; another run may find a "
            "different one"
        )


class _Child:
    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,  # closed when this process ends for any reason
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the search, which ends the child
        )
        theirs.close()

    def send(self, message: object) -> None:
        with suppress(OSError):  # the process has ended, which `receive` will report
            self.pipe.send(message)

    def receive(self) -> tuple[str, Any]:
        try:
            if not self.pipe.poll(HUNG_SECONDS):
                return "end", f"sent no request for {HUNG_SECONDS:g} s"
            message: tuple[str, Any] = self.pipe.recv()
            return message
        except (EOFError, OSError):
            code = self.process.wait()
        if code >= 0:
            return "end", f"ended with code {code}"
        return "end", f"was killed by {signal.Signals(-code).name}"

    def end(self) -> None:
        self.process.kill()
        self.pipe.close()
        self.process.communicate()
