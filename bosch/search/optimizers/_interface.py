"""What an optimizer is asked, and the table of masks it has tried.

An optimizer is a file of this folder with `search(trials: Trials) -> None`: it tries masks of the
problem by `trials.try_mask` until it knows no more or the evaluations are spent, which ends it by
an exception. What it found is in the table, so that whatever ends it, a child process that dies
included, the best mask that meets the quota is kept.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from bosch.plugins import load_plugin
from bosch.search.objective import Anchors, SearchEnded, Value, normalized_loss

PACKAGE = "bosch.search.optimizers"
SMALLEST_STEP = 1e-4  # between two values: they are rounded to it
# These take a start of any quota, and the paper starts them from the dense model.
WITH_PENALTY = ("nomad", "one_plus_one")

Bits = tuple[int, ...]  # one a variable, 1 = full


@dataclass(frozen=True)
class Problem:
    """Which `quota` of `num_variables` go on the window."""

    num_variables: int
    quota: int
    evaluate: Callable[[Bits, float | None], Value]  # threshold as in bosch/search/evaluations.py
    max_evaluations: int  # different masks
    seed: int = 0
    # Masks to begin with. Those of another quota are mended where the loss has no penalty for it.
    starts: tuple[Bits, ...] = ()
    most_local: Sequence[int] = ()  # variables in the order in which they go on the window
    anchors: Anchors | None = None  # of the loss, for optimizers that leave the quota
    alpha: float = 100.0
    best_possible: float = 1.0  # no value is above it
    exact_values: bool = False  # of every mask, for statistics: no evaluation is ended early
    end_early_in_nomad: bool = False  # its models then see bounds instead of some values

    def __post_init__(self) -> None:
        assert 0 <= self.quota <= self.num_variables
        assert all(len(bits) == self.num_variables for bits in self.starts)

    @property
    def num_candidates(self) -> int:
        return math.comb(self.num_variables, self.quota)

    def loss(self, bits: Bits, value: float) -> float:
        """What the paper minimizes: the normalized value, negated, and a penalty for missing the
        quota.
        """
        assert self.anchors is not None
        num, ratio = self.num_variables, self.quota / self.num_variables
        return normalized_loss(value, bits.count(0), num, ratio, self.anchors, self.alpha)

    def value_for(self, bits: Bits, loss: float) -> float:
        """The value with which a mask has that loss."""
        assert self.anchors is not None
        span = self.anchors.high - self.anchors.low
        return (self.loss(bits, 0.0) - loss) * span

    def meets_quota(self, bits: Bits) -> bool:
        return bits.count(0) == self.quota

    def mend(self, bits: Bits) -> Bits:
        """The mask, changed to meet the quota."""
        return mend(bits, self.quota, self.most_local)

    def first_mask(self) -> Bits:
        """The first start, mended, or the most local variables on the window."""
        return self.mend(self.starts[0] if self.starts else (1,) * self.num_variables)


def mend(bits: Bits, quota: int, most_local: Sequence[int] = ()) -> Bits:
    """The mask with as many variables changed as its quota needs: the most local ones are put on
    the window, or the most global ones taken off it. Without an order the first ones are local.
    """
    order = list(most_local or range(len(bits)))
    missing = quota - bits.count(0)
    if missing < 0:
        order.reverse()
    mended, wanted = list(bits), int(missing > 0)
    for variable in [v for v in order if bits[v] == wanted][: abs(missing)]:
        mended[variable] = 1 - wanted
    return tuple(mended)


class EvaluationsSpentError(Exception):
    """The problem allows no further mask."""


@dataclass
class Trials:
    """The masks of a problem tried so far."""

    problem: Problem
    table: dict[Bits, Value] = field(default_factory=dict)  # in the order of the trials
    best: Bits | None = None  # of those that meet the quota; the first of equals
    nearest: tuple[float, Bits] | None = None  # the least loss, and the mask that has it
    notes: list[str] = field(default_factory=list)  # a line each, for the user
    reproducible: bool = True  # False: a clock or another process had a part in it

    @property
    def left(self) -> int:
        return self.problem.max_evaluations - len(self.table)

    @property
    def best_value(self) -> float:
        return -math.inf if self.best is None else self.table[self.best].value

    def try_mask(self, bits: Bits, threshold: float | None = None) -> Value:
        """The value of a mask; one tried before costs nothing. With a threshold, `exact` may be
        False: the value then is a bound that does not exceed it.
        """
        if bits not in self.table:
            if self.left <= 0:
                raise EvaluationsSpentError
            if self.problem.exact_values or threshold == -math.inf:
                threshold = None
            self.evaluate(bits, threshold)
        return self.table[bits]

    def evaluate(self, bits: Bits, threshold: float | None) -> None:
        value = self.table[bits] = self.problem.evaluate(bits, threshold)
        if threshold is not None and value.value <= threshold:
            return  # whether it is a value or a bound is a matter of speed
        if self.problem.meets_quota(bits) and value.value > self.best_value:
            self.best = bits
        if self.problem.anchors is not None:
            found = self.problem.loss(bits, value.value), bits
            self.nearest = min(self.nearest or found, found)

    def best_or_mended(self) -> Bits:
        """The best mask; where none tried meets the quota the one with the least loss, mended."""
        problem = self.problem
        mended = problem.mend(self.nearest[1]) if self.nearest else problem.first_mask()
        return self.best or mended


@dataclass(frozen=True)
class Found:
    """What an optimizer made of a problem."""

    bits: Bits  # meets the quota
    value: Value | None  # None: the search was ended before a mask of the quota was evaluated
    trials: Trials
    ended_by: str | None  # what ended it before its time: --max-evaluations or --max-hours


def optimize(name: str, problem: Problem) -> Found:
    """The best mask that the optimizer of this name finds; ended early, the best so far."""
    trials, ended_by = Trials(problem), None
    try:
        with suppress(EvaluationsSpentError):
            load_plugin(PACKAGE, name).search(trials)
        if trials.best is None:  # beyond the budget if need be
            trials.evaluate(trials.best_or_mended(), None)
    except SearchEnded as ended:
        ended_by = str(ended)
    bits = trials.best_or_mended()
    return Found(bits, trials.table.get(bits), trials, ended_by)
