"""The interface of an optimizer: the problem it solves, and the table of masks it has tried.

An optimizer is a file of this folder with `search(trials: Trials) -> Proposals`: a generator that
yields masks to try, and the threshold that their values must exceed to be of interest:

    yield [assignment], threshold
    value = trials.table[assignment]

`optimize` (bosch/search/search.py) is the loop around it. It scores what is proposed, enters the
values in the table, and ends when the optimizer does or when the evaluations are used up. So the
best mask that meets the quota survives however an optimizer ends, even if its child process dies.
Several masks may be proposed at once, for ranks to share; their values are bounds (`exact` is
False) where they do not exceed the threshold. Repeating a mask is free."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bosch.masks.mask import Z
from bosch.search.objective import Anchors, Value
from bosch.search.settings import SearchSettings

PACKAGE = "bosch.search.optimizers"
SMALLEST_STEP = 1e-4  # between two values, which are rounded to it
# These may leave the quota, and the paper starts them from the dense model.
WITH_PENALTY = ("nomad", "one_plus_one")

Variable = tuple[tuple[int, int], ...]  # the groups (layer, group) that share one decision
Assignment = tuple[int, ...]  # a value for each variable: 1 = full, 0 = window
Proposals = Iterator[tuple[Sequence[Assignment], float | None]]  # masks to try, and the threshold


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Which `quota` of the variables get the window?"""

    variables: Sequence[Variable]
    around: Z  # the mask of all other groups
    quota: int
    max_evaluations: int  # distinct masks
    anchors: Anchors  # of the loss, for optimizers that may leave the quota
    settings: SearchSettings = field(default_factory=SearchSettings)
    seed: int = 0
    # Masks to start from; none: from that of the dense model. Optimizers that keep the quota repair
    # those that miss it.
    starts: tuple[Assignment, ...] = ()
    prior: Sequence[float] = ()  # how global each variable is thought to be
    enough: float = math.inf  # a mask of the quota with this value ends the search
    # So many masks in a row that gain next to nothing end it. None: all evaluations are used.
    patience: int | None = None
    exact_values: bool = False  # for statistics: no evaluation is stopped early
    known: Mapping[Assignment, Value] = field(default_factory=dict)  # from before
    questions: Sequence[int] = ()  # on each haystack
    # Groups of each layer that must stay full, where every group is a variable of its own.
    least_full: int = 0

    def __post_init__(self) -> None:
        if not self.starts:
            object.__setattr__(self, "starts", ((1,) * len(self.variables),))

    def allows(self, assignment: Assignment) -> bool:
        """Whether enough groups of each layer are full."""
        if not self.least_full:
            return True
        z = assign(self.around, self.variables, assignment)
        return min(map(sum, z)) >= self.least_full

    def repair(self, assignment: Assignment) -> Assignment:
        layers = [layer for ((layer, _), *_) in self.variables]
        return repair(assignment, self.quota, self.prior, layers, self.least_full)

    def loss(self, assignment: Assignment, value: float) -> float:
        """Equation 5, which an optimizer that may leave the quota minimizes:

            alpha (share on the window - share asked for)^2 - normalized value

        Over all groups of the model it is equation 3."""
        num_variables = len(self.variables)
        deviation = assignment.count(0) / num_variables - self.quota / num_variables
        return self.settings.alpha * deviation**2 - self.anchors.normalized(value)


def assign(z: Z, variables: Sequence[Variable], assignment: Assignment) -> Z:
    """The mask with these values of the variables; all other groups stay as they are."""
    rows = [list(row) for row in z]
    for places, bit in zip(variables, assignment, strict=True):
        for layer, group in places:
            rows[layer][group] = bit
    return tuple(map(tuple, rows))


def repair(
    assignment: Assignment,
    quota: int,
    prior: Sequence[float] = (),
    layers: Sequence[int] = (),
    least_full: int = 0,
) -> Assignment:
    """Change as many variables as the quota needs: window the most local full ones, or make the
    most global windowed ones full. `prior`: how global each is. `layers`: of each variable; with
    `least_full`, so many of each layer stay full."""
    order = list(range(len(assignment)))
    if prior:  # the most local first
        # Shuffled, always in the same way: rankings have many equal values, and of those the first
        # layers would get all windows.
        random.Random(0).shuffle(order)
        order.sort(key=lambda v: prior[v])
    missing = quota - assignment.count(0)  # to be windowed; below 0, so many get full again
    candidates = [v for v in order if assignment[v] == int(missing > 0)]
    if least_full and missing > 0:
        # The most global come last, so those that a layer may not lose are its last ones.
        left, free = Counter(layers[v] for v in candidates), []
        for v in candidates:
            if left[layers[v]] > least_full:
                left[layers[v]] -= 1
                free.append(v)
        candidates = free
    changed = candidates[:missing] if missing >= 0 else candidates[missing:]
    return tuple(1 - bit if v in changed else bit for v, bit in enumerate(assignment))


@dataclass
class Trials:
    """The masks that were tried; in the end, the solution."""

    problem: Problem
    table: dict[Assignment, Value] = field(default_factory=dict)  # in the order of the trials
    best: Assignment | None = None  # of those that meet the quota; the first of equals
    best_value: float = -math.inf
    best_standing: tuple[float, float] = (-math.inf, 0.0)
    nearest: tuple[float, Assignment] | None = None  # the lowest loss, and its mask
    notes: list[str] = field(default_factory=list)  # lines to print
    reproducible: bool = True  # False: a clock or a failed process affected the result
    ended_by: str | None = None  # the limit that cut it short: --max-evaluations or --max-hours

    @property
    def left(self) -> int:
        return self.problem.max_evaluations - len(self.table)

    @property
    def to_beat(self) -> float:
        """The threshold for a mask to become the best. Where ties are broken, equal ones may too:
        then they must be read in full."""
        return self.best_value - self.problem.settings.breaks_ties * 0.75 * SMALLEST_STEP

    def add(self, assignment: Assignment, value: Value, threshold: float | None) -> None:
        self.table[assignment] = value
        # Below the threshold it may be a value or a bound, as the accelerations decide. The search
        # must not depend on them.
        if threshold is not None and value.value <= threshold:
            return
        meets_quota = assignment.count(0) == self.problem.quota
        standing = self.problem.settings.standing(value)
        if meets_quota and standing > self.best_standing:
            self.best, self.best_value, self.best_standing = assignment, value.value, standing
        candidate = self.problem.loss(assignment, value.value), assignment
        self.nearest = min(self.nearest or candidate, candidate)

    @property
    def assignment(self) -> Assignment:
        """The best mask, or if none meets the quota, the one with the lowest loss, repaired."""
        nearest = self.nearest[1] if self.nearest else self.problem.starts[0]
        return self.best or self.problem.repair(nearest)

    @property
    def value(self) -> Value | None:
        """None: the search ended before any mask of the quota was evaluated."""
        return self.table.get(self.assignment)
