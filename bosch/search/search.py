"""A search for the groups that keep full attention.

Every mask can be scored: the share of the calibration questions that the model answers right under
it (score.py). There are far too many masks to score them all, so a method of bosch/methods
asks one smaller question after another: which `quota` of these variables get the window, if all
other groups stay as they are? `solve` answers it: it enumerates the candidates if they are few, and
otherwise has an optimizer propose them (optimizers/). `optimize` is the loop around it.

    search = begin_search(inputs)  # all groups full, and both ends scored
    with search.until_ended():
        search.solve("swaps", search.groups, search.num_windowed, max_evaluations)
    return finish(search)

stages.py asks the paper's questions, bosch/methods/bosch.py ours; finish.py ends a search."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from bosch.masks.mask import Unit, Z
from bosch.method import Inputs, Table
from bosch.plugins import load_plugin
from bosch.run.errors import UserError
from bosch.run.progress import Bar, say, track
from bosch.search.objective import Anchors, SearchEnded, Value, anchors_between
from bosch.search.optimizers._interface import (
    PACKAGE,
    WITH_PENALTY,
    Assignment,
    Problem,
    Trials,
    Variable,
    assign,
    repair,
)
from bosch.search.score import Evaluator, make_evaluator
from bosch.search.settings import SearchSettings

LEAST_GAIN = 0.002  # what pays for further evaluations: a tenth of one question of 48


def begin_search(inputs: Inputs, unit: Unit = "group") -> "Search":
    """A new search: every group full, and the dense and the fully windowed model scored."""
    evaluator = make_evaluator(inputs, inputs.settings)
    # One after the other: what the first loses decides in which order the second is read.
    full, local = (((bit,) * inputs.num_groups,) * inputs.num_layers for bit in (1, 0))
    try:
        (dense,) = evaluator.score([full], part="anchors")
        (windowed,) = evaluator.score([local], part="anchors")
    except SearchEnded as ended:
        raise UserError(
            f"{ended} before the dense and the fully windowed model are scored; raise it."
        ) from None
    anchors = anchors_between(dense, windowed, inputs.settings.gamma)
    return Search(inputs, evaluator, anchors, unit)


class Search:
    """The state of a search: the current mask, the best at the ratio, and the record for
    mask.json."""

    def __init__(self, inputs: Inputs, evaluator: Evaluator, anchors: Anchors, unit: Unit) -> None:
        self.inputs, self.evaluator, self.anchors, self.unit = inputs, evaluator, anchors, unit
        self.settings: SearchSettings = inputs.settings
        self.num_layers, self.num_groups = inputs.num_layers, inputs.num_groups
        self.num_windowed = inputs.num_windowed  # groups that end up on the window
        self.least_full = inputs.min_full_per_layer
        if unit == "layer":
            self.num_windowed = inputs.num_windowed_layers * self.num_groups
        self.groups = self.groups_of(range(self.num_layers))  # every group decides for itself
        self.z: Z = ((1,) * self.num_groups,) * self.num_layers  # the current mask
        self.best: tuple[float, Z] | None = None  # of those that window `num_windowed` groups
        self.best_standing = -math.inf, 0.0
        self.cut_short: str | None = None  # the limit that ended it
        self.reproducible = True
        self.drawn = False  # whether the mask depends on the seed
        # How global each group is, for the mask of a search that ends before it has scored one: as
        # far as nothing is known, the same of each layer, so that none loses all its groups.
        rows = self.num_layers if unit == "group" else 0
        self.fallback: Table = (tuple(map(float, range(self.num_groups))),) * rows
        # For the record in mask.json: what the method adds, and each solved subproblem.
        self.details: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        # The course of the search, for its picture. Of each mask that was asked for, in order: the
        # subproblem, what the mask was found to be worth (None: stopped early), and whether it
        # meets the subproblem's quota. What is known of masks by now is in `evaluator.values`.
        self.course: dict[Z, tuple[str, float | None, bool]] = {}

    def groups_of(self, layers: Sequence[int]) -> list[Variable]:
        """One variable for each group of some layers; the groups of a layer side by side."""
        return [((layer, group),) for layer in layers for group in range(self.num_groups)]

    def meet_ratio(self, guide: Table = ()) -> None:
        """Repair the current mask. guide: how global each group is."""
        current = tuple(bit for row in self.z for bit in row)
        self.z = assign(self.z, self.groups, self._repaired(current, guide))

    def mask_by(self, guide: Table) -> Z:
        """The mask at the ratio in which the most global groups are full."""
        return assign(self.z, self.groups, self._repaired((1,) * len(self.groups), guide))

    def _repaired(self, assignment: Assignment, guide: Table) -> Assignment:
        """Of all groups, at the ratio."""
        prior = [value for row in guide for value in row]
        layers = [layer for ((layer, _),) in self.groups]
        return repair(assignment, self.num_windowed, prior, layers, self.least_full)

    def solve(
        self,
        part: str,
        variables: Sequence[Variable],
        quota: int,
        max_evaluations: int,
        guides: Sequence[Table] = (),
        starts: Sequence[Z] = (),
        exact_values: bool = False,
        enough: float = math.inf,
        patience: int | None = None,
    ) -> Trials:
        """Put the best `quota` of the variables on the window, as far as the evaluations allow, and
        update the current mask. Other groups stay as they are.

        A guide is a table of how global each group is. Optimizers that keep the quota start from
        `starts`, or if there are none, from the masks that the guides choose; the first guide also
        decides how masks are repaired. A mask with the value `enough` ends it, and so do `patience`
        masks in a row that gain next to nothing."""
        planned = count_solving(len(variables), quota, max_evaluations)
        enumerated = planned == math.comb(len(variables), quota)
        method = "exhaustive" if enumerated else self.settings.optimizer
        priors = [[sum(guide[l][g] for l, g in places) for places in variables] for guide in guides]
        dense, layers = (1,) * len(variables), [layer for ((layer, _), *_) in variables]
        begin = [repair(dense, quota, prior, layers, self.least_full) for prior in priors]
        if starts:
            begin = [values_of(z, variables) for z in starts]
        # An earlier mask tells something here if it differs from the current one in these variables
        # only: if the current mask with its values of them is that mask again.
        known = {}
        for z in self.course:
            assignment = values_of(z, variables)
            if assign(self.z, variables, assignment) == z:
                known[assignment] = self.evaluator.values[z]
        # Groups on the window in a mask that solves this: a variable's groups share its value, and
        # all variables have equally many.
        others = assign(self.z, variables, (1,) * len(variables))
        num_windowed = sum(row.count(0) for row in others) + quota * len(variables[0])
        problem = Problem(
            variables=variables,
            around=self.z,
            quota=quota,
            max_evaluations=planned,
            # A seed for each subproblem, below 1,000,000: NOMAD draws that many random numbers
            # before it starts.
            seed=random.Random(f"{self.inputs.seed} {part}").randrange(1_000_000),
            starts=() if self.settings.optimizer in WITH_PENALTY else tuple(begin),
            prior=priors[0] if priors else (),
            anchors=self.anchors,
            settings=self.settings,
            enough=enough,
            # All candidates, in a fixed order: masks without a gain say nothing of the rest.
            patience=None if enumerated else patience,
            exact_values=exact_values,
            questions=self.evaluator.questions,
            known=known,
            least_full=self.least_full,
        )
        with track(part, planned, "evaluations") as bar:
            score = partial(self.score, part=part, num_windowed=num_windowed, bar=bar)
            solution = optimize(method, problem, score)
        self.z = assign(self.z, variables, solution.assignment)
        self.reproducible &= solution.reproducible
        self.drawn |= not enumerated
        for note in solution.notes:
            say(f"{part}: {note}")
        self.steps.append(
            {
                "name": part,
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

    def score(
        self,
        masks: Sequence[Z],
        threshold: float | None = None,
        *,
        part: str,
        num_windowed: int | None = None,
        bar: Bar | None = None,
        haystacks: Sequence[int] | None = None,
    ) -> list[Value]:
        """Score masks for a part of the search, and record their values. num_windowed: groups on
        the window in masks that may be its result; None: these are none. threshold, bar, haystacks:
        see Evaluator.score."""
        more = threshold, part, num_windowed, bar
        try:
            values = self.evaluator.score(masks, threshold, part=part, haystacks=haystacks, bar=bar)
        except SearchEnded:
            # --max-evaluations still scores as many of them as are allowed.
            self._record([z for z in masks if z in self.evaluator.values], *more)
            raise
        self._record(masks, *more)
        return values

    def _record(
        self,
        masks: Sequence[Z],
        threshold: float | None,
        part: str,
        num_windowed: int | None,
        bar: Bar | None,
    ) -> None:
        for z in masks:
            value = self.evaluator.values[z]
            windowed = sum(row.count(0) for row in z)
            # At or below the threshold it may be a value or a bound, as the accelerations decide:
            # what a search shows and finds must not depend on them.
            found = value.exact and (threshold is None or value.value > threshold)
            if z not in self.course:
                shown = value.value if found else None
                self.course[z] = part, shown, windowed == num_windowed
            if not found:
                continue
            if bar is not None and windowed == num_windowed:
                best = float(bar.figures.get("best", -math.inf))
                bar.figures["best"] = max(best, value.value)
            # A subproblem's quota is of its own layers: a mask may meet it and not the ratio.
            meets_ratio = windowed == self.num_windowed and min(map(sum, z)) >= self.least_full
            standing = self.settings.standing(value)
            if meets_ratio and (self.best is None or standing > self.best_standing):
                self.best, self.best_standing = (value.value, z), standing

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


def values_of(z: Z, variables: Sequence[Variable]) -> Assignment:
    return tuple(z[layer][group] for ((layer, group), *_) in variables)


def count_solving(num_variables: int, quota: int, max_evaluations: int) -> int:
    """Evaluations of a subproblem: all candidates if there are no more of them than allowed."""
    return min(math.comb(num_variables, quota), max_evaluations)


def optimize(
    name: str,
    problem: Problem,
    score: Callable[[Sequence[Z], float | None], Sequence[Value]],
) -> Trials:
    """The loop around every optimizer: it proposes masks, and finds their values in the table. The
    result is the best mask that it found; if a limit ends it, the best so far.

    score: the values of masks, which may be bounds where they do not exceed the threshold."""
    trials = Trials(problem)
    # The best value when it last rose by LEAST_GAIN, and how many masks have been tried since.
    paid, num_since = -math.inf, 0
    try:
        # Closed as soon as the loop ends, also by an error: NOMAD's process must not outlive it.
        with closing(load_plugin(PACKAGE, name).search(trials)) as proposals:
            for proposed, threshold in proposals:
                new = [assignment for assignment in proposed if assignment not in trials.table]
                if not new:
                    continue
                if trials.left <= 0:
                    break
                new = new[: trials.left]
                if problem.exact_values or threshold == -math.inf:
                    threshold = None
                masks = [assign(problem.around, problem.variables, each) for each in new]
                for assignment, value in zip(new, score(masks, threshold), strict=True):
                    trials.add(assignment, value, threshold)
                if trials.best_value >= problem.enough:
                    trials.notes.append(
                        "a mask answers as well as the dense model: the search ends with it"
                    )
                    break
                num_since += len(new)
                if trials.best_value >= paid + LEAST_GAIN:
                    paid, num_since = trials.best_value, 0
                if problem.patience is not None and num_since >= problem.patience:
                    trials.notes.append(
                        f"the last {num_since} masks have not raised the value by {LEAST_GAIN:g}: "
                        f"the search ends after {len(trials.table)} of {problem.max_evaluations}"
                    )
                    break
        if trials.best is None:  # one evaluation more than planned, if necessary
            mask = assign(problem.around, problem.variables, trials.assignment)
            (value,) = score([mask], None)
            trials.add(trials.assignment, value, None)
    except SearchEnded as ended:
        trials.ended_by = str(ended)
    return trials
