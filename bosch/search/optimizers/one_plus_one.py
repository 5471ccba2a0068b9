"""The (1+1) evolutionary algorithm of Droste et al. (2002): every bit of the present mask flips
with probability 1/n, and what is no worse takes its place.

The paper's fallback where NOMAD builds no models, above 49 variables. Its loss has the penalty for
missing the quota, so a flip that cannot pay for its penalty even with the best possible value needs
no evaluation: it would be refused. Those that are evaluated may end early for the same reason.
"""

import random

from bosch.search.optimizers._interface import SMALLEST_STEP, Trials

FLIPS_PER_EVALUATION = 1_000  # so that a search that finds no new mask ends


def search(trials: Trials) -> None:
    problem = trials.problem
    draw = random.Random(problem.seed)
    current = problem.starts[0] if problem.starts else (1,) * problem.num_variables
    present = problem.loss(current, trials.try_mask(current).value)
    for _ in range(FLIPS_PER_EVALUATION * problem.max_evaluations):
        flips = (draw.random() < 1 / problem.num_variables for _ in current)
        bits = tuple(bit ^ flip for bit, flip in zip(current, flips, strict=True))
        needed = problem.value_for(bits, present)
        if bits in trials.table or needed > problem.best_possible:
            continue
        # One step lower, since values are rounded: a mask as good as the present one is taken.
        threshold = needed - SMALLEST_STEP
        if problem.meets_quota(bits):
            threshold = min(threshold, trials.best_value)
        new = problem.loss(bits, trials.try_mask(bits, threshold).value)
        if new <= present + 1e-12:
            current, present = bits, new
