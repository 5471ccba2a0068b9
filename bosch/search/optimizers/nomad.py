"""The paper's optimizer: NOMAD on the loss with a penalty for missing the quota, from the first
start as it is.

NOMAD may leave the quota; of the masks it asked for, the best that meets it counts. It builds no
models above 49 variables: there the (1+1) evolutionary algorithm takes its place, as in the paper.
"""

import math

from bosch.search.optimizers import one_plus_one
from bosch.search.optimizers._interface import Bits, Trials
from bosch.search.optimizers._nomad_process import minimize
from bosch.search.settings import check_nomad_installed

MOST_VARIABLES = 49  # with a quadratic model in NOMAD


def search(trials: Trials) -> None:
    problem = trials.problem
    if problem.num_variables > MOST_VARIABLES:
        trials.notes.append(
            f"{problem.num_variables} variables are more than the {MOST_VARIABLES} for which NOMAD "
            "builds models: searched by one_plus_one, the paper's fallback"
        )
        return one_plus_one.search(trials)
    check_nomad_installed()
    least = math.inf

    def loss_of(bits: Bits) -> float:
        nonlocal least
        threshold = None
        if problem.end_early_in_nomad and least < math.inf:
            threshold = problem.value_for(bits, least)
            if problem.meets_quota(bits):
                threshold = min(threshold, trials.best_value)
        value = trials.try_mask(bits, threshold).value
        if threshold is not None:  # a bound depends on how far the evaluation went, this does not
            value = max(value, threshold)
        least = min(least, loss := problem.loss(bits, value))
        return loss

    start = problem.starts[0] if problem.starts else (1,) * problem.num_variables
    ended_by = minimize(loss_of, start, trials.left, problem.seed)
    if ended_by:
        trials.reproducible = False
        trials.notes.append(
            f"NOMAD {ended_by}: the last {trials.left} of {problem.max_evaluations} evaluations of "
            "this subproblem are not made, its best mask so far is kept; another run may find "
            "another one"
        )
