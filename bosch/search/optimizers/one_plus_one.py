"""The (1+1) evolutionary algorithm of Droste et al. (2002): flip every variable of the current mask
with probability 1/n, and accept the result if it is no worse.

The paper's fallback above 49 variables, where NOMAD builds no models. The loss penalizes missing
the quota, so a mask whose penalty exceeds even the best possible value is skipped without
evaluation. Other evaluations may stop early for the same reason."""

import random

from bosch.search.objective import weighted
from bosch.search.optimizers._interface import SMALLEST_STEP, Proposals, Trials

FLIPS_PER_EVALUATION = 1_000  # ends a search that finds no new mask


def search(trials: Trials) -> Proposals:
    problem = trials.problem
    draw = random.Random(problem.seed)
    current = problem.starts[0]
    yield [current], None
    present = problem.loss(current, trials.table[current].value)
    best_possible = weighted(problem.settings.objective, 1.0, 1.0, 0.0)
    for _ in range(FLIPS_PER_EVALUATION * problem.max_evaluations):
        flips = (draw.random() < 1 / len(current) for _ in current)
        assignment = tuple(bit ^ flip for bit, flip in zip(current, flips, strict=True))
        # The value at which it has the present loss: equation 5 solved for the value, in which the
        # loss is linear.
        scale = problem.anchors.high - problem.anchors.low
        needed = (problem.loss(assignment, 0.0) - present) * scale
        if assignment in trials.table or needed > best_possible:
            continue
        # One step lower, since values are rounded: a mask as good as the current one is accepted.
        threshold = needed - SMALLEST_STEP
        # A mask of the quota may also become the result, by its value alone.
        if assignment.count(0) == problem.quota:
            threshold = min(threshold, trials.best_value)
        yield [assignment], threshold
        new = problem.loss(assignment, trials.table[assignment].value)
        # Of equal losses, sums in another order differ in the last digit.
        if new <= present + 1e-12:
            current, present = assignment, new
