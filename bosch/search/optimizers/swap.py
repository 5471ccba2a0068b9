"""Local search over masks that meet the quota: it swaps a windowed variable with a full one.

It takes the first neighbor in random order that is no worse; equal masks are accepted so that the
search crosses the plateaus of a score that counts examples. When every neighbor has been tried, it
continues from the best mask after two to four random swaps (a kick). Only neighbors that are no
worse must be scored exactly, so other evaluations may stop early.
"""

import itertools
import math
import random
from collections.abc import Iterator

from bosch.search.optimizers._interface import SMALLEST_STEP, Assignment, Trials

KICKS = (2, 3, 4)  # swaps of a kick
KICKS_IN_VAIN = 1_000  # kicks without a new mask, after which the space counts as exhausted


def search(trials: Trials) -> None:
    draw = random.Random(trials.problem.seed)
    current = best_start(trials)
    while current is not None:  # until no neighbor or kick is left
        current = first_step(trials, current, draw) or kick(trials, draw)


def best_start(trials: Trials) -> Assignment | None:
    problem = trials.problem
    for assignment in problem.starts or [problem.first_start]:
        trials.try_mask(problem.repair(assignment), trials.best_value)
    return trials.best


def first_step(trials: Trials, current: Assignment, draw: random.Random) -> Assignment | None:
    """The first untried neighbor, in random order, that is no worse."""
    present = trials.table[current].value
    for neighbor in shuffled_neighbors(current, draw):
        if neighbor not in trials.table:
            # Any threshold in the upper half of the last step tests the same: is it >= present?
            value = trials.try_mask(neighbor, present - 0.75 * SMALLEST_STEP)
            if value.exact and value.value >= present:
                return neighbor
    return None


def kick(trials: Trials, draw: random.Random) -> Assignment | None:
    """Evaluate an untried mask a few swaps away from the best one. None if there is none left."""
    problem, best = trials.problem, trials.best
    assert best is not None
    num_candidates = math.comb(problem.num_variables, problem.quota)
    for _ in range(KICKS_IN_VAIN if len(trials.table) < num_candidates else 0):
        kicked = swap_some(best, draw.choice(KICKS), draw)
        if kicked not in trials.table:
            trials.try_mask(kicked)
            return kicked
    return None


def shuffled_neighbors(assignment: Assignment, draw: random.Random) -> Iterator[Assignment]:
    """All masks one swap away, in random order. Grouping those that share their lower layers would
    be cheaper, but with equal evaluations found worse masks (0.60 against 0.64 on entangled
    synthetic problems of 64 variables, mean of 30).
    """
    pairs = list(itertools.product(*windowed_and_full(assignment)))
    draw.shuffle(pairs)
    return (swapped(assignment, [i], [j]) for i, j in pairs)


def swap_some(assignment: Assignment, count: int, draw: random.Random) -> Assignment:
    windowed, full = windowed_and_full(assignment)
    count = min(count, len(windowed), len(full))
    return swapped(assignment, draw.sample(windowed, count), draw.sample(full, count))


def windowed_and_full(assignment: Assignment) -> tuple[list[int], list[int]]:
    windowed, full = ([v for v, bit in enumerate(assignment) if bit == kind] for kind in (0, 1))
    return windowed, full


def swapped(assignment: Assignment, windowed: list[int], full: list[int]) -> Assignment:
    new = list(assignment)
    for i, j in zip(windowed, full, strict=True):
        new[i], new[j] = 1, 0
    return tuple(new)
