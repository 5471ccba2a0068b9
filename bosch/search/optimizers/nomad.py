"""The paper's optimizer: NOMAD on the loss with a penalty for missing the quota, started from the
first start without repair.

NOMAD may leave the quota; the result is the best of its masks that meets it. NOMAD builds no models
above 49 variables, so the (1+1) evolutionary algorithm is used there, as in the paper.
"""

import math

from bosch.search.optimizers import one_plus_one
from bosch.search.optimizers._interface import Assignment, Trials
from bosch.search.optimizers._nomad_process import minimize
from bosch.search.settings import check_nomad_installed

MOST_VARIABLES = 49  # for which NOMAD builds a quadratic model


def search(trials: Trials) -> None:
    problem = trials.problem
    if problem.num_variables > MOST_VARIABLES:
        trials.notes.append(
            f"{problem.num_variables} variables exceed the {MOST_VARIABLES} for which NOMAD builds "
            "models; using one_plus_one, the paper's fallback"
        )
        return one_plus_one.search(trials)
    check_nomad_installed()
    least = math.inf

    def loss_of(assignment: Assignment) -> float:
        nonlocal least
        threshold = None
        if problem.end_early_in_nomad and least < math.inf:
            threshold = problem.value_for(assignment, least)
            if problem.meets_quota(assignment):
                threshold = min(threshold, trials.best_value)
        value = trials.try_mask(assignment, threshold).value
        if threshold is not None:  # unlike a bound, this does not depend on accelerations
            value = max(value, threshold)
        least = min(least, loss := problem.loss(assignment, value))
        return loss

    ended_by = minimize(loss_of, problem.first_start, trials.left, problem.seed)
    if ended_by:
        trials.reproducible = False
        trials.notes.append(
            f"NOMAD {ended_by}: the last {trials.left} of {problem.max_evaluations} evaluations of "
            "this subproblem are skipped and its best mask so far is used; another run may find a "
            "different one"
        )
