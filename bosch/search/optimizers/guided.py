"""Local search by swaps, as in swap.py, that tries the most promising swaps first.

A model of the outcomes so far predicts how well each haystack is answered after a swap. It may
propose several at once for the ranks to share; the best of them that is no worse than the current
mask is accepted."""
# M masks, N variables, T haystacks

import heapq
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bosch.masks.ranks import ranks_of
from bosch.search.objective import Means, Value
from bosch.search.optimizers._interface import SMALLEST_STEP, Assignment, Proposals, Trials
from bosch.search.optimizers.swap import best_start, kick, swapped, windowed_and_full

Array = NDArray[np.floating[Any]]

NEAR = 16  # variables in which a mask may differ from the current one and still inform about it
FADING = 0.3  # how fast the weight of a mask falls with the variables beyond one swap
NOISE = 0.05  # of an outcome, against the effects of groups: what the ridge regressions shrink by
# What separates the most global variable from the most local one by the prior: lowest, first guess,
# highest. It is fitted as soon as there are enough outcomes.
SPREAD, FEWEST_OUTCOMES = (0.004, 0.02, 0.2), 8


def search(trials: Trials) -> Proposals:
    problem = trials.problem
    draw = random.Random(problem.seed)
    current = yield from best_start(trials)
    dense = problem.anchors.dense.haystacks
    answered = [dense[number].log_probability for number in sorted(dense)]
    surrogate = Surrogate(problem.questions, len(problem.variables), problem.prior, answered)
    surrogate.learn(problem.known)
    while current is not None:  # until no neighbor or kick is left
        surrogate.learn(trials.table)
        untried = (  # the seed decides between equals
            (gain, draw.random(), neighbor)
            for gain, i, j in surrogate.gains(current)
            if (neighbor := swapped(current, [i], [j])) not in trials.table
            and problem.allows(neighbor)
        )
        proposals = [mask for *_, mask in heapq.nlargest(problem.settings.masks_at_once, untried)]
        if not proposals:
            current = yield from kick(trials, draw)
            continue
        present = trials.table[current].value
        # Any threshold in the upper half of the last step tests the same: is it >= present?
        yield proposals, present - 0.75 * SMALLEST_STEP
        # The last evaluations may not have sufficed for all of them, and bounds lie below.
        scored = [mask for mask in proposals if mask in trials.table and trials.table[mask].exact]
        best = max(scored, key=lambda mask: trials.table[mask].value, default=current)
        if trials.table[best].value >= present:
            current = best


class Surrogate:
    """A linear model of the groups for each haystack, fitted to every outcome so far: one ridge
    regression for all haystacks together, which starts from the prior, and one for how each departs
    from it. Those that an evaluation did not read are simply missing."""

    def __init__(
        self,
        questions: Sequence[int],
        num_variables: int,
        prior: Sequence[float] = (),
        answered: Sequence[float] = (),
    ) -> None:
        """prior: how global each variable is thought to be. answered: the log-probability of each
        haystack's answers by the dense model; 0 if it is not given."""
        self._answered = answered or [0.0] * len(questions)
        self._weights_T = np.array(questions) / sum(questions)
        # Only the order of the prior counts, as its numbers come from rankings on different scales:
        # from -1/2, the most local variable, to 1/2.
        self._prior_N: Array = np.zeros(num_variables)
        if prior:
            self._prior_N = ranks_of(prior) / max(1, num_variables - 1) - 0.5
        self._seen: dict[Assignment, Array] = {}  # the quality of each haystack, nan if unknown

    def learn(self, table: Mapping[Assignment, Value]) -> None:
        # A mask may come again with more haystacks read: what tells most about it is kept.
        for assignment, value in table.items():
            known_T = self._seen.setdefault(assignment, np.full(len(self._weights_T), np.nan))
            if len(value.haystacks) > np.isfinite(known_T).sum():
                for number, means in value.haystacks.items():
                    known_T[number] = quality(means, self._answered[number])

    def gains(self, current: Assignment) -> Iterator[tuple[float, int, int]]:
        """The predicted quality after each swap of a windowed variable with a full one."""
        effects_TN, present_T = self.effects(current)
        windowed, full = windowed_and_full(current)
        for i in windowed:
            change_TF = effects_TN[:, i, None] - effects_TN[:, full]
            # A haystack that is answered cannot gain, nor one that is lost lose: that is what makes
            # it worthwhile to know effects by haystack.
            after_TF = np.clip(present_T[:, None] + change_TF, 0.0, 1.0)
            # Rounded: the last digits depend on the machine.
            for j, gain in zip(full, np.round(self._weights_T @ after_TF, 6), strict=True):
                yield float(gain), i, j

    def effects(self, current: Assignment) -> tuple[Array, Array]:
        """(T, N): how much the quality of each haystack changes when a group becomes full, or is
        lost when it is windowed; and (T): the quality of each haystack under the current mask.

        Every other mask is an equation: the sum of the effects of the groups in which it differs
        from the current mask is how much better each haystack is answered under it. There are far
        fewer equations than effects, so they are solved in three steps, each of which explains only
        what the one before has left:

            effect of a group on a haystack = scale * prior        how global rankings find it
                                            + shared departure     from it, on all haystacks
                                            + own departure        of this haystack

        A ridge regression draws departures towards 0: what no outcome contradicts stays as before.
        """
        present_T, here_N = self._seen[current], np.array(current, float)
        masks_MN = np.array(list(self._seen), float)
        distance_M = np.abs(masks_MN - here_N).sum(1)
        # Effects do not add up over many groups: those that stand in for each other cost little
        # alone. So masks far away say nothing, and those beyond one swap (2 variables) count less.
        near_M = (distance_M > 0) & (distance_M <= NEAR)
        # 1: full there but not here, -1: the other way round.
        change_MN = masks_MN[near_M] - here_N
        gain_MT: Array = np.array(list(self._seen.values()))[near_M] - present_T
        weight_M = 1 / (1 + FADING * np.maximum(0, distance_M[near_M] - 2))
        # An evaluation that ended early did not read all haystacks: the others are nan, and a mask
        # tells as much more as it has read.
        known_MT = np.isfinite(gain_MT)
        count_M = known_MT.sum(1)
        mean_M = np.where(known_MT, gain_MT, 0).sum(1) / np.maximum(count_M, 1)
        evidence_M = weight_M * count_M
        # First step. What the prior predicts for each mask, against what it gained: their best
        # common factor is a least-squares fit of one number. A few outcomes may not turn the prior
        # around, or blow it up; it keeps its sign and a size within bounds.
        lowest, scale, highest = SPREAD
        predicted_M = change_MN @ self._prior_N
        square = float(evidence_M @ predicted_M**2)
        if len(mean_M) > FEWEST_OUTCOMES and square > 0:
            fitted = float(evidence_M @ (predicted_M * mean_M)) / square
            scale = min(max(fitted, lowest), highest)
        # Second step: the mean over haystacks of what is left.
        prior_N = scale * self._prior_N
        rest_M = mean_M - change_MN @ prior_N
        shared_N = prior_N + ridge(change_MN, rest_M, evidence_M / len(present_T))
        # Third step: each haystack by itself, from the masks that read it.
        effects_TN = np.tile(shared_N, (len(present_T), 1))
        for number, read_M in enumerate(known_MT.T):
            rest_M = gain_MT[read_M, number] - change_MN[read_M] @ shared_N
            effects_TN[number] += ridge(change_MN[read_M], rest_M, weight_M[read_M])
        return effects_TN, present_T


def quality(means: Means, answered: float) -> float:
    """How well a haystack is answered, from 0 to 1, with a slope where objectives have none.

    Accuracy has steps only, and a probability near 0 hardly changes. The fourth root of the
    probability still tells answers apart that are far from right. It is taken as a share of the
    dense model's, whose logarithm is `answered`: a long text has next to none by any mask."""
    right = (means.accuracy + means.probability) / 2
    lost = min(0.0, means.log_probability - answered)
    return (right + math.exp(max(lost, -700.0) / 4)) / 2


def ridge(x_MN: Array, y_M: Array, weight_M: Array) -> Array:
    """Effects that explain y, each drawn towards 0."""
    used_M = weight_M > 0
    x_MN, y_M, weight_M = x_MN[used_M], y_M[used_M], weight_M[used_M]
    # Two forms of one solution, of which the one with the smaller system is solved. W: the weights.
    #     fewer masks:    X' (X X' + NOISE W^-1)^-1 y      a system of M equations
    #     fewer groups:   (X' W X + NOISE I)^-1 X' W y     of N
    num_masks, num_variables = x_MN.shape
    if num_masks < num_variables:
        gram_MM = x_MN @ x_MN.T + NOISE * np.diag(1 / weight_M)
        effects_N: Array = x_MN.T @ np.linalg.solve(gram_MM, y_M)
    else:
        gram_NN = (x_MN.T * weight_M) @ x_MN + NOISE * np.eye(num_variables)
        effects_N = np.linalg.solve(gram_NN, x_MN.T @ (weight_M * y_M))
    return effects_N
