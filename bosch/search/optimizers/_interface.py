"""The interface of an optimizer: the problem it solves, and the table of masks it has tried.

An optimizer is a file of this folder with `search(trials: Trials) -> None`. It tries masks with
`trials.try_mask` until it has no more to try, or until an exception ends it because the evaluations
are used up. Results are read from the table, so the best mask that meets the quota survives however
the optimizer ends, even if its child process dies."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from bosch.plugins import load_plugin
from bosch.search.objective import Anchors, SearchEnded, Value
from bosch.search.settings import SearchSettings

PACKAGE = "bosch.search.optimizers"
SMALLEST_STEP = 1e-4  # between two values, which are rounded to it
LEAST_GAIN = 0.002  # what pays for further evaluations: a tenth of one question of 48
# These may leave the quota, and the paper starts them from the dense model.
WITH_PENALTY = ("nomad", "one_plus_one")

Assignment = tuple[int, ...]  # a value for each variable: 1 = full, 0 = window


@dataclass(frozen=True)
class Problem:
    """Which `quota` of `num_variables` get the window?"""

    num_variables: int
    quota: int
    # Values of several masks. Second argument: the threshold.
    evaluate: Callable[[Sequence[Assignment], float | None], list[Value]]
    max_evaluations: int  # distinct masks
    anchors: Anchors  # of the loss, for optimizers that may leave the quota
    settings: SearchSettings = field(default_factory=SearchSettings)
    seed: int = 0
    # Masks to start from. Optimizers that keep the quota repair those that miss it.
    starts: tuple[Assignment, ...] = ()
    prior: Sequence[float] = ()  # how global each variable is thought to be
    enough: float = math.inf  # a mask of the quota with this value ends the search
    # So many masks in a row that together do not raise the best value by LEAST_GAIN end it. None:
    # all evaluations are used.
    patience: int | None = None
    exact_values: bool = False  # for statistics: no evaluation is stopped early
    known: Mapping[Assignment, Value] = field(default_factory=dict)  # from before
    questions: Sequence[int] = ()  # on each haystack

    def loss(self, assignment: Assignment, value: float) -> float:
        """Equation 5: the negated normalized value, plus a penalty for missing the quota. Over all
        groups of the model it is equation 3."""
        num = self.num_variables
        deviation = assignment.count(0) / num - self.quota / num
        return self.settings.alpha * deviation**2 - self.anchors.normalized(value)

    def meets_quota(self, assignment: Assignment) -> bool:
        return assignment.count(0) == self.quota

    @property
    def first_start(self) -> Assignment:
        return self.starts[0] if self.starts else (1,) * self.num_variables


def repair(assignment: Assignment, quota: int, prior: Sequence[float] = ()) -> Assignment:
    """Change as many variables as the quota needs: window the most local full ones, or make the
    most global windowed ones full. `prior`: how global each is; of equals the first are local."""
    order = sorted(range(len(assignment)), key=lambda v: prior[v] if prior else 0)
    missing = quota - assignment.count(0)
    wanted = int(missing > 0)
    candidates = [v for v in order if assignment[v] == wanted]
    changed = candidates[:missing] if missing >= 0 else candidates[missing:]
    return tuple(1 - bit if v in changed else bit for v, bit in enumerate(assignment))


class EvaluationsSpentError(Exception):
    """All evaluations of the problem are used, or no more are needed."""


@dataclass
class Trials:
    """The masks that were tried; in the end, the solution."""

    problem: Problem
    table: dict[Assignment, Value] = field(default_factory=dict)  # in the order of the trials
    best: Assignment | None = None  # of those that meet the quota; the first of equals
    nearest: tuple[float, Assignment] | None = None  # the lowest loss, and its mask
    notes: list[str] = field(default_factory=list)  # lines to print
    reproducible: bool = True  # False: a clock or a failed process affected the result
    ended_by: str | None = None  # the limit that cut it short: --max-evaluations or --max-hours
    # The best value when it last rose by LEAST_GAIN, and how many masks have been tried since.
    paid: float = -math.inf
    num_since: int = 0

    @property
    def left(self) -> int:
        return self.problem.max_evaluations - len(self.table)

    @property
    def best_value(self) -> float:
        return -math.inf if self.best is None else self.table[self.best].value

    def try_mask(self, assignment: Assignment, threshold: float | None = None) -> Value:
        """The value of a mask; repeating one is free. With a threshold the value may be a bound
        that does not exceed it (`exact` is False)."""
        return self.try_masks([assignment], threshold)[0]

    def try_masks(
        self, assignments: Sequence[Assignment], threshold: float | None = None
    ) -> list[Value]:
        """The values of several masks, with one threshold for all."""
        new = [assignment for assignment in assignments if assignment not in self.table]
        if new and self.left <= 0:
            raise EvaluationsSpentError
        if self.problem.exact_values or threshold == -math.inf:
            threshold = None
        new = new[: self.left]
        for assignment, value in zip(new, self.problem.evaluate(new, threshold), strict=True):
            self.add(assignment, value, threshold)
        if new and self.best_value >= self.problem.enough:
            self.notes.append("a mask answers as well as the dense model: the search ends with it")
            raise EvaluationsSpentError
        if new and not self._still_pays(len(new)):
            self.notes.append(
                f"the last {self.num_since} masks have not raised the value by {LEAST_GAIN:g}: "
                f"the search ends after {len(self.table)} of {self.problem.max_evaluations}"
            )
            raise EvaluationsSpentError
        return [self.table[assignment] for assignment in assignments if assignment in self.table]

    def _still_pays(self, num_new: int) -> bool:
        self.num_since += num_new
        if self.best_value >= self.paid + LEAST_GAIN:
            self.paid, self.num_since = self.best_value, 0
        patience = self.problem.patience
        return patience is None or self.num_since < patience

    def add(self, assignment: Assignment, value: Value, threshold: float | None = None) -> None:
        self.table[assignment] = value
        if threshold is not None and value.value <= threshold:
            return  # value or bound: that depends on the accelerations
        if self.problem.meets_quota(assignment) and value.value > self.best_value:
            self.best = assignment
        candidate = self.problem.loss(assignment, value.value), assignment
        self.nearest = min(self.nearest or candidate, candidate)

    @property
    def assignment(self) -> Assignment:
        """The best mask, or if none meets the quota, the one with the lowest loss, repaired."""
        nearest = self.nearest[1] if self.nearest else self.problem.first_start
        return self.best or repair(nearest, self.problem.quota, self.problem.prior)

    @property
    def value(self) -> Value | None:
        """None: the search ended before any mask of the quota was evaluated."""
        return self.table.get(self.assignment)


def optimize(name: str, problem: Problem) -> Trials:
    """The best mask that this optimizer finds; if a limit ends it, the best so far."""
    trials = Trials(problem)
    try:
        with suppress(EvaluationsSpentError):
            load_plugin(PACKAGE, name).search(trials)
        if trials.best is None:  # one evaluation more than planned, if necessary
            mask = trials.assignment
            trials.add(mask, problem.evaluate([mask], None)[0])
    except SearchEnded as ended:
        trials.ended_by = str(ended)
    return trials
