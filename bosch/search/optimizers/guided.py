"""Local search by swaps, as in swap.py, that tries the most promising swaps first.

A model of the outcomes so far (_surrogate.py) predicts what each swap of a windowed variable with a
full one would do. It may propose several at once for the ranks to share; the best of them that is
no worse than the current mask is accepted."""

import heapq
import random

from bosch.search.optimizers._interface import SMALLEST_STEP, Assignment, Trials
from bosch.search.optimizers._surrogate import Surrogate
from bosch.search.optimizers.swap import best_start, kick, swapped


def search(trials: Trials) -> None:
    problem = trials.problem
    draw = random.Random(problem.seed)
    current = best_start(trials)
    surrogate = Surrogate(problem.questions, problem.num_variables, problem.prior)
    surrogate.learn(problem.known)
    while current is not None:  # until no neighbor or kick is left
        surrogate.learn(trials.table)
        untried = (  # the seed decides between equals
            (gain, draw.random(), neighbor)
            for gain, i, j in surrogate.gains(current)
            if (neighbor := swapped(current, [i], [j])) not in trials.table
        )
        proposals = [mask for *_, mask in heapq.nlargest(problem.settings.masks_at_once, untried)]
        current = accept(trials, current, proposals) if proposals else kick(trials, draw)


def accept(trials: Trials, current: Assignment, proposals: list[Assignment]) -> Assignment:
    """The best of the proposals if it is no worse, else the current mask."""
    present = trials.table[current].value
    # Any threshold in the upper half of the last step tests the same: is it >= present?
    values = trials.try_masks(proposals, present - 0.75 * SMALLEST_STEP)
    tried = [(value.value, -n) for n, value in enumerate(values) if value.exact]
    if not tried or max(tried)[0] < present:
        return current
    return proposals[-max(tried)[1]]
