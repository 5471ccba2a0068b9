"""A search for the groups that keep full attention.

Every mask can be scored: the share of the calibration questions that the model answers right under
it (evaluations.py). There are far too many masks to score them all, so a method of bosch/methods
asks one smaller question after another: which `quota` of these variables get the window, if all
other groups stay as they are? `solve` answers it: it enumerates the candidates if they are few, and
otherwise has an optimizer propose them (optimizers/).

    with open_search(inputs) as search:  # all groups full, and both ends scored
        with search.until_ended():
            search.solve("swaps", search.all_groups(), search.num_windowed, max_evaluations)
        return finish(search)

stages.py asks the paper's questions, bosch/methods/bosch.py ours; finish.py ends a search."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bosch.masks.mask import Unit, Z
from bosch.method import Inputs, Table
from bosch.run.errors import UserError
from bosch.run.progress import Bar, say, track
from bosch.search.objective import Anchors, SearchEnded, Value, anchors_between
from bosch.search.optimizers import _interface
from bosch.search.optimizers._interface import Assignment, Problem, Trials, repair
from bosch.search.score import Evaluator, open_evaluator
from bosch.search.settings import SearchSettings

Variable = tuple[tuple[int, int], ...]  # the groups (layer, group) that share one decision


@contextmanager
def open_search(inputs: Inputs, unit: Unit = "group") -> "Iterator[Search]":
    """A new search: every group full, and the dense and the fully windowed model scored."""
    with open_evaluator(inputs, inputs.settings) as evaluator:
        # One after the other: what the first loses decides in which order the second is read.
        full, local = (((bit,) * inputs.num_groups,) * inputs.num_layers for bit in (1, 0))
        try:
            (dense,) = evaluator.score([full], stage="anchors")
            (windowed,) = evaluator.score([local], stage="anchors")
        except SearchEnded as ended:
            raise UserError(
                f"{ended} before the dense and the fully windowed model are scored; raise it."
            ) from None
        anchors = anchors_between(dense, windowed, inputs.settings.gamma)
        yield Search(inputs, evaluator, anchors, unit)


class Search:
    def __init__(self, inputs: Inputs, evaluator: Evaluator, anchors: Anchors, unit: Unit) -> None:
        self.inputs, self.evaluator, self.anchors, self.unit = inputs, evaluator, anchors, unit
        self.settings: SearchSettings = inputs.settings
        self.num_layers, self.num_groups = inputs.num_layers, inputs.num_groups
        self.num_windowed = inputs.num_windowed  # groups that end up on the window
        if unit == "layer":
            self.num_windowed = inputs.num_windowed_layers * self.num_groups
        self.z: Z = ((1,) * self.num_groups,) * self.num_layers  # the current mask
        self.outcomes: dict[Z, Value] = {}  # of all evaluated masks
        self.best: tuple[float, Z] | None = None  # of those that window `num_windowed` groups
        self.cut_short: str | None = None  # the limit that ended it
        self.reproducible = True
        self.drawn = False  # whether the mask depends on the seed
        # For the record in mask.json: what the method adds, and each solved subproblem.
        self.details: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        # For the picture, of each evaluation: its subproblem, its value (None: stopped early), and
        # whether the mask meets the subproblem's quota.
        self.values: list[tuple[str, float | None, bool]] = []

    def groups_of(self, layers: Sequence[int]) -> list[Variable]:
        """One variable for each group of some layers."""
        return [((layer, group),) for layer in layers for group in range(self.num_groups)]

    def all_groups(self) -> list[Variable]:
        return self.groups_of(range(self.num_layers))

    def mask(self, variables: Sequence[Variable], assignment: Assignment) -> Z:
        rows = [list(row) for row in self.z]
        for places, bit in zip(variables, assignment, strict=True):
            for layer, group in places:
                rows[layer][group] = bit
        return tuple(map(tuple, rows))

    def meet_ratio(self, guide: Table | None = None) -> None:
        """Repair the current mask. guide: how global each group is."""
        groups = self.all_groups()
        prior = [value for row in guide or () for value in row]
        current = tuple(bit for row in self.z for bit in row)
        self.z = self.mask(groups, repair(current, self.num_windowed, prior))

    def solve(
        self,
        name: str,
        variables: Sequence[Variable],
        quota: int,
        max_evaluations: int,
        guides: Sequence[Table] = (),
        exact_values: bool = False,
        enough: float = math.inf,
        patience: int | None = None,
    ) -> Trials:
        """Put the best `quota` of the variables on the window, as far as the evaluations allow, and
        update the current mask. Other groups stay as they are.

        A guide is a table of how global each group is. Optimizers that keep the quota start from
        the masks that the guides choose; the first guide also decides how masks are repaired. A
        mask with the value `enough` ends it, and so do `patience` masks in a row that gain next to
        nothing."""
        planned = count_solving(len(variables), quota, max_evaluations)
        enumerated = planned == math.comb(len(variables), quota)
        method = "exhaustive" if enumerated else self.settings.optimizer
        priors = [[sum(guide[l][g] for l, g in places) for places in variables] for guide in guides]
        starts = [repair((1,) * len(variables), quota, prior) for prior in priors]
        known = {}  # of masks that differ only in these variables
        for z, value in self.outcomes.items():
            assignment = tuple(z[places[0][0]][places[0][1]] for places in variables)
            if self.mask(variables, assignment) == z:
                known[assignment] = value

        with track(name, planned, "evaluations") as bar:

            def evaluate(assignments: Sequence[Assignment], threshold: float | None) -> list[Value]:
                masks = [self.mask(variables, assignment) for assignment in assignments]
                meet_quota = [assignment.count(0) == quota for assignment in assignments]
                return self.evaluate(masks, threshold, name, meet_quota, bar)

            problem = Problem(
                num_variables=len(variables),
                quota=quota,
                evaluate=evaluate,
                max_evaluations=planned,
                # Each subproblem has its own; a small one, as NOMAD draws `seed` times first.
                seed=random.Random(f"{self.inputs.seed} {name}").randrange(1_000_000),
                starts=() if self.settings.optimizer in _interface.WITH_PENALTY else tuple(starts),
                prior=priors[0] if priors else (),
                anchors=self.anchors,
                settings=self.settings,
                enough=enough,
                patience=patience,
                exact_values=exact_values,
                questions=self.evaluator.questions,
                known=known,
            )
            solution = _interface.optimize(method, problem)
        self.z = self.mask(variables, solution.assignment)
        self.reproducible &= solution.reproducible
        self.drawn |= not enumerated
        for note in solution.notes:
            say(f"{name}: {note}")
        self.steps.append(
            {
                "name": name,
                "layers": sorted({layer for places in variables for layer, _ in places}),
                "num_variables": len(variables),
                "num_windowed": quota,
                "method": method,
                "evaluations": len(solution.table),
                "value": solution.value.value if solution.value else None,
            }
        )
        if solution.ended_by is not None:
            raise SearchEnded(solution.ended_by)
        return solution

    def evaluate(
        self,
        masks: Sequence[Z],
        threshold: float | None,
        part: str,
        meet_quota: Sequence[bool],
        bar: Bar | None = None,
        haystacks: Sequence[int] | None = None,
    ) -> list[Value]:
        """Evaluate masks for a subproblem and record their values. threshold, bar, haystacks: see
        Evaluator.score."""
        values = self.evaluator.score(masks, threshold, part, haystacks, bar)
        for z, value, meets_quota in zip(masks, values, meet_quota, strict=True):
            above = value.exact and (threshold is None or value.value > threshold)
            if z not in self.outcomes:
                self.values.append((part, value.value if above else None, meets_quota))
            self.outcomes[z] = value
            if bar is not None and above and meets_quota:
                best = float(bar.figures.get("best", -math.inf))
                bar.figures["best"] = max(best, value.value)
            is_candidate = sum(row.count(0) for row in z) == self.num_windowed
            if above and is_candidate and (self.best is None or value.value > self.best[0]):
                self.best = value.value, z
        return values

    def score_of(self, value: Value) -> float:
        """The objective's value. For accuracy the exact share of examples, so that equal drops are
        equal."""
        if self.settings.objective == "accuracy" and value.accuracy is not None:
            return value.accuracy
        return value.value

    @contextmanager
    def until_ended(self) -> Iterator[None]:
        """Leave the block when --max-evaluations or --max-hours ends the search."""
        try:
            yield
        except SearchEnded as ended:
            self.cut_short = str(ended)
            self.reproducible &= not self.evaluator.out_of_time


def count_solving(num_variables: int, quota: int, max_evaluations: int) -> int:
    """Evaluations of a subproblem: all candidates if there are no more of them than allowed."""
    return min(math.comb(num_variables, quota), max_evaluations)
