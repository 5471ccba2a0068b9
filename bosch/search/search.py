"""A search in progress: the current mask, the evaluations so far, and the record for mask.json.

    with open_search(inputs) as search:
        with search.until_ended():
            search.solve("global", search.all_groups(), inputs.budget, 100)
        return finish(search)

stages.py holds the stages that methods combine, finish.py the end of a search.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bosch.masks.mask import Unit
from bosch.method import Inputs, Table
from bosch.run.errors import UserError
from bosch.run.fingerprint import hash_file, plain
from bosch.run.progress import describe_seconds, say
from bosch.search.evaluations import MaskObjective, open_objective
from bosch.search.objective import Anchors, SearchEnded, Value, Z, find_anchors, weighted
from bosch.search.optimizers._interface import (
    WITH_PENALTY,
    Assignment,
    Problem,
    Solution,
    optimize,
    repair,
)
from bosch.search.settings import SearchSettings

Variable = tuple[tuple[int, int], ...]  # the groups (layer, group) that share one decision
ENUMERATED = "exhaustive"
LIMITS = ("max_evaluations", "max_hours")  # these only decide when a search stops


@dataclass(frozen=True)
class SolvedPart:
    """One solved subproblem, for the record."""

    name: str
    layers: tuple[int, ...]
    num_variables: int
    num_windowed: int
    method: str
    evaluations: int
    value: float | None  # of the resulting mask; None: no mask was evaluated


@dataclass
class Search:
    """The state of a search; see the top of the file."""

    inputs: Inputs
    settings: SearchSettings
    objective: MaskObjective
    anchors: Anchors
    z: Z  # the current mask
    budget: int  # groups that end up on the window
    unit: Unit = "group"
    solved_parts: list[SolvedPart] = field(default_factory=list)
    # For each evaluation: its subproblem, its value (None: stopped early), and whether the mask
    # meets the subproblem's quota.
    values: list[tuple[str, float | None, bool]] = field(default_factory=list)
    outcomes: dict[Z, Value] = field(default_factory=dict)  # of all evaluated masks
    best: tuple[float, Z] | None = None  # of the evaluated masks that meet the budget
    details: dict[str, Any] = field(default_factory=dict)  # of the method, for the record
    cut_short: str | None = None  # the limit that ended it
    reproducible: bool = True
    drawn: bool = False  # whether the mask depends on the seed

    # ------------------------------------------------------------------------------------- masks

    @property
    def num_layers(self) -> int:
        return self.inputs.num_layers

    @property
    def num_groups(self) -> int:
        return self.inputs.num_groups

    def groups_of(self, layers: Sequence[int]) -> list[Variable]:
        """One variable for each group of some layers."""
        return [((layer, group),) for layer in layers for group in range(self.num_groups)]

    def all_groups(self) -> list[Variable]:
        return self.groups_of(range(self.num_layers))

    def whole_layers(self) -> list[Variable]:
        """One variable for each layer."""
        groups = range(self.num_groups)
        return [tuple((layer, group) for group in groups) for layer in range(self.num_layers)]

    def dense(self) -> Z:
        return ((1,) * self.num_groups,) * self.num_layers

    def mask(self, variables: Sequence[Variable], assignment: Assignment) -> Z:
        """The current mask with these variables set to the assignment."""
        rows = [list(row) for row in self.z]
        for places, bit in zip(variables, assignment, strict=True):
            for layer, group in places:
                rows[layer][group] = bit
        return tuple(map(tuple, rows))

    def assignment_in(self, z: Z, variables: Sequence[Variable]) -> Assignment:
        """The values of these variables in a mask."""
        return tuple(z[places[0][0]][places[0][1]] for places in variables)

    # ------------------------------------------------------------------------------- evaluations

    def evaluate_all(
        self,
        masks: Sequence[Z],
        threshold: float | None,
        part: str,
        meet_quota: Sequence[bool],
        texts: Sequence[int] | None = None,
    ) -> list[Value]:
        """Evaluate masks for a subproblem and record their values. threshold, texts: see
        MaskObjective."""
        values = self.objective.score_masks(masks, threshold, part, texts)
        for z, value, meets_quota in zip(masks, values, meet_quota, strict=True):
            above = value.exact and (threshold is None or value.value > threshold)
            if z not in self.outcomes:
                self.values.append((part, value.value if above else None, meets_quota))
            self.outcomes[z] = value
            meets_budget = sum(row.count(0) for row in z) == self.budget
            is_better = self.best is None or value.value > self.best[0]
            if above and meets_budget and is_better:
                self.best = value.value, z
        return values

    def score_of(self, value: Value) -> float:
        """The objective's value. For accuracy the exact share of examples, so that equal drops are
        equal.
        """
        if self.settings.objective == "accuracy" and value.accuracy is not None:
            return value.accuracy
        return value.value

    def solve(
        self,
        name: str,
        variables: Sequence[Variable],
        quota: int,
        max_evaluations: int,
        guides: Sequence[Table] = (),
        exact_values: bool = False,
    ) -> Solution:
        """Put the best `quota` of the variables on the window, as far as the evaluations allow, and
        update the current mask. Other groups stay as they are.

        A guide is a table of how global each group is. Optimizers that keep the quota start from
        the masks that the guides choose; the first guide also decides how masks are repaired.
        """
        planned = count_solving(len(variables), quota, max_evaluations)
        enumerated = planned == math.comb(len(variables), quota)
        method = ENUMERATED if enumerated else self.settings.optimizer
        priors = [guide_scores(guide, variables) for guide in guides]
        starts = [repair((1,) * len(variables), quota, prior) for prior in priors]

        def evaluate(assignments: Sequence[Assignment], threshold: float | None) -> list[Value]:
            masks = [self.mask(variables, assignment) for assignment in assignments]
            meet_quota = [assignment.count(0) == quota for assignment in assignments]
            return self.evaluate_all(masks, threshold, name, meet_quota)

        known = {}  # of masks that differ only in these variables
        for z, value in self.outcomes.items():
            assignment = self.assignment_in(z, variables)
            if self.mask(variables, assignment) == z:
                known[assignment] = value

        problem = Problem(
            num_variables=len(variables),
            quota=quota,
            evaluate=evaluate,
            max_evaluations=planned,
            # Each subproblem has its own seed.
            seed=random.Random(f"{self.inputs.seed} {name}").randrange(1_000_000),
            starts=() if self.settings.optimizer in WITH_PENALTY else tuple(starts),
            prior=priors[0] if priors else (),
            anchors=self.anchors,
            alpha=self.settings.alpha,
            best_possible=weighted(self.settings.objective, 1.0, 1.0, 0.0),
            exact_values=exact_values,
            end_early_in_nomad=self.settings.nomad_early_end,
            masks_at_once=self.settings.masks_at_once,
            questions=self.objective.questions,
            known=known,
        )

        def meets_quota(z: Z) -> bool:
            return problem.meets_quota(self.assignment_in(z, variables))

        with self.objective.tracking(name, planned, meets_quota):
            solution = optimize(method, problem)
        self.z = self.mask(variables, solution.assignment)
        self.reproducible &= solution.trials.reproducible
        self.drawn |= method != ENUMERATED
        for note in solution.trials.notes:
            say(f"{name}: {note}")
        layers = tuple(sorted({layer for places in variables for layer, _ in places}))
        reached = solution.value.value if solution.value else None
        evaluations = len(solution.trials.table)
        self.solved_parts.append(
            SolvedPart(name, layers, len(variables), quota, method, evaluations, reached)
        )
        if solution.ended_by is not None:
            raise SearchEnded(solution.ended_by)
        return solution

    # ------------------------------------------------------------------------------- from and to

    def announce(self, planned: Mapping[str, int]) -> None:
        """Print the planned cost before the search starts."""
        total = sum(planned.values())
        parts = ", ".join(f"{name} {count:,}" for name, count in planned.items())
        texts = len(self.inputs.calibration.haystacks)
        line = (
            f"plan: at most {total:,} evaluations ({parts}), "
            f"{total * texts * self.num_layers:,} layer-forwards"
        )
        cost = self.objective.cost
        if cost.computed:
            seconds = cost.evaluation_seconds / cost.computed
            line += (
                f"; at most {describe_seconds(total * seconds)} ({seconds:.2g} s per evaluation so "
                "far; most need fewer layers and texts)"
            )
        say(line)
        for limit in LIMITS:
            if (value := getattr(self.settings, limit)) is not None:
                say(f"it stops with the best mask so far at --{limit.replace('_', '-')} {value:g}")

    @contextmanager
    def until_ended(self) -> Iterator[None]:
        """Leave the block when --max-evaluations or --max-hours ends the search."""
        try:
            yield
        except SearchEnded as ended:
            self.cut_short = str(ended)
            self.reproducible &= not self.objective.out_of_time


@contextmanager
def open_search(inputs: Inputs, unit: Unit = "group") -> Iterator[Search]:
    """A new search: every group full, and the dense and the fully windowed model scored."""
    settings: SearchSettings = inputs.settings
    # What determines the course of the search. Of a file this is the content, not the path.
    deciding: dict[str, Any] = plain(settings)
    deciding |= {name: hash_file(v) for name, v in vars(settings).items() if isinstance(v, Path)}
    with open_objective(
        inputs,
        settings.objective,
        {
            "method": type(settings).__module__,
            "settings": {name: v for name, v in deciding.items() if name not in LIMITS},
        },
        settings.accelerations,
        settings.max_evaluations,
        settings.max_hours,
        settings.masks_at_once,
    ) as objective:
        layers, groups = inputs.num_layers, inputs.num_groups
        try:
            anchors = find_anchors(objective, layers, groups, settings.gamma)
        except SearchEnded as ended:
            raise UserError(
                f"{ended} before the dense and the fully windowed model are scored; raise it."
            ) from None
        budget = inputs.budget if unit == "group" else inputs.layer_budget * groups
        yield Search(inputs, settings, objective, anchors, ((1,) * groups,) * layers, budget, unit)


def guide_scores(guide: Table, variables: Sequence[Variable]) -> list[float]:
    """How global a guide finds each variable."""
    return [sum(guide[layer][group] for layer, group in places) for places in variables]


def count_solving(num_variables: int, quota: int, max_evaluations: int) -> int:
    """Evaluations of a subproblem: all candidates if there are no more of them than allowed."""
    return min(math.comb(num_variables, quota), max_evaluations)
