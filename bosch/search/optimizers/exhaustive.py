"""Tries every mask of the quota in a fixed order; the first of equals wins, unless log-probability
decides between them."""

from itertools import combinations

from bosch.search.optimizers._interface import Proposals, Trials


def search(trials: Trials) -> Proposals:
    variables = range(len(trials.problem.variables))
    for windowed in combinations(variables, trials.problem.quota):
        assignment = tuple(int(v not in windowed) for v in variables)
        if trials.problem.allows(assignment):
            yield [assignment], trials.to_beat
