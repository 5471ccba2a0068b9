"""Tries every mask of the quota in a fixed order; the first of equals wins."""

from itertools import combinations

from bosch.search.optimizers._interface import Trials


def search(trials: Trials) -> None:
    problem = trials.problem
    for windowed in combinations(range(problem.num_variables), problem.quota):
        chosen = set(windowed)
        assignment = tuple(int(variable not in chosen) for variable in range(problem.num_variables))
        trials.try_mask(assignment, trials.best_value)
