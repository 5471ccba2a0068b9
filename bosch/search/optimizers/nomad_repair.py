"""NOMAD proposes, and what it proposes is mended to the quota before it is judged, so that no
evaluation goes to a mask of the wrong size.

Where NOMAD has nothing new to propose it starts again from the best mask, with another seed and
another order in which masks are mended.
"""

import random

from bosch.search.optimizers._interface import Bits, Trials
from bosch.search.optimizers._nomad_process import check_installed
from bosch.search.optimizers.nomad import MOST_VARIABLES, run_noting

# Many proposals are mended to the same mask; a run ends after so many for each evaluation left.
PROPOSALS_PER_EVALUATION = 4
RUNS_IN_VAIN = 3  # without a new mask
# Without the quadratic models and the simplex search, which cost seconds a proposal and find no
# more when most proposals are mended (measured on synthetic problems of 16 and 32 variables).
FAST = (
    "QUAD_MODEL_SEARCH no",
    "NM_SEARCH no",
    "EVAL_QUEUE_SORT DIR_LAST_SUCCESS",
    "DIRECTION_TYPE ORTHO 2N",
)


def search(trials: Trials) -> None:
    problem = trials.problem
    if problem.num_variables > MOST_VARIABLES:
        raise ValueError(
            f"--optimizer nomad_repair takes at most {MOST_VARIABLES} variables, this subproblem "
            f"has {problem.num_variables}; use swap, or fewer layers at once (--max-layers)."
        )
    check_installed()
    draw = random.Random(problem.seed)
    order = list(problem.most_local or range(problem.num_variables))
    start, in_vain = problem.first_mask(), 0
    while trials.left > 0 and in_vain < RUNS_IN_VAIN and len(trials.table) < problem.num_candidates:
        tried = len(trials.table)

        def loss_of(bits: Bits, order: list[int] = order) -> float:
            return -trials.try_mask(problem.mend(bits, order)).value

        proposals = PROPOSALS_PER_EVALUATION * trials.left
        if not run_noting(trials, loss_of, start, proposals, draw.randrange(2**31), FAST):
            return
        in_vain = in_vain + 1 if len(trials.table) == tried else 0
        start = trials.best or start
        order = draw.sample(order, len(order))
