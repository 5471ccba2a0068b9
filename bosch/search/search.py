"""A search under way: the mask as it stands, what has been evaluated, and what its record says.

    with open_search(context) as search:
        with search.until_ended():
            search.solve("global", search.all_groups(), context.budget, 100)
        return finish(search)

What the methods do with it is in stages.py, the end of it in finish.py.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bosch.masks.mask import Unit
from bosch.method import Inputs
from bosch.run.errors import UserError
from bosch.run.fingerprint import hash_file, plain
from bosch.run.progress import describe_seconds, say
from bosch.search.evaluations import MaskObjective, open_objective
from bosch.search.objective import Anchors, Rows, SearchEnded, Value, find_anchors, weighted
from bosch.search.optimizers._interface import Bits, Found, Problem, optimize
from bosch.search.settings import SearchSettings

Variable = tuple[tuple[int, int], ...]  # the groups (layer, group) that it puts on the window
ENUMERATED = "exhaustive"
LIMITS = ("max_evaluations", "max_hours")  # these only decide how far a search goes


@dataclass(frozen=True)
class Step:
    """One subproblem, for the record."""

    name: str
    layers: tuple[int, ...]
    num_variables: int
    num_windowed: int
    method: str
    evaluations: int
    value: float | None  # of the objective, for the mask found; None: none was evaluated


@dataclass
class Search:
    """See the top of the file."""

    inputs: Inputs
    settings: SearchSettings
    objective: MaskObjective
    anchors: Anchors
    z: Rows
    budget: int  # groups on the window in the end
    unit: Unit = "group"
    steps: list[Step] = field(default_factory=list)
    # Of each evaluation: its step, its value (None: ended early), and whether the mask meets the
    # step's quota.
    values: list[tuple[str, float | None, bool]] = field(default_factory=list)
    best: tuple[float, Rows] | None = None  # of the masks evaluated that meet the budget
    details: dict[str, Any] = field(default_factory=dict)  # of the method, for the record
    cut_short: str | None = None  # by what
    reproducible: bool = True
    drawn: bool = False  # whether the seed had a part

    # ------------------------------------------------------------------------------------- masks

    @property
    def num_layers(self) -> int:
        return self.inputs.num_layers

    @property
    def num_groups(self) -> int:
        return self.inputs.num_groups

    def groups_of(self, layers: Sequence[int]) -> list[Variable]:
        """Each group of some layers a variable."""
        return [((layer, group),) for layer in layers for group in range(self.num_groups)]

    def all_groups(self) -> list[Variable]:
        return self.groups_of(range(self.num_layers))

    def whole_layers(self) -> list[Variable]:
        """Each layer a variable."""
        groups = range(self.num_groups)
        return [tuple((layer, group) for group in groups) for layer in range(self.num_layers)]

    def dense(self) -> Rows:
        return ((1,) * self.num_groups,) * self.num_layers

    def mask(self, variables: Sequence[Variable], bits: Bits) -> Rows:
        """The present mask with these variables as the bits say."""
        rows = [list(row) for row in self.z]
        for places, bit in zip(variables, bits, strict=True):
            for layer, group in places:
                rows[layer][group] = bit
        return tuple(map(tuple, rows))

    def bits(self, variables: Sequence[Variable], z: Rows) -> Bits:
        """How a mask has these variables."""
        return tuple(z[places[0][0]][places[0][1]] for places in variables)

    # ------------------------------------------------------------------------------- evaluations

    def evaluate(
        self, z: Rows, threshold: float | None, step: str, meets_quota: bool = True
    ) -> Value:
        """A mask's value, noted for the record; threshold as in bosch/search/evaluations.py."""
        before = self.objective.evaluations()
        value = self.objective(z, threshold, step)
        kept = threshold is None or value.value > threshold
        if self.objective.evaluations() > before:
            self.values.append((step, value.value if kept else None, meets_quota))
        meets = sum(row.count(0) for row in z) == self.budget
        if kept and meets and (self.best is None or value.value > self.best[0]):
            self.best = value.value, z
        return value

    def score_of(self, value: Value) -> float:
        """The objective's value; of accuracy the share of examples itself, so that equal drops are
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
        starts: Sequence[Bits] = (),
        most_local: Sequence[int] = (),
        exact_values: bool = False,
        optimizer: str | None = None,
    ) -> Found:
        """Put the best `quota` of the variables on the window, as far as the evaluations go; the
        present mask becomes that one. All others stay as they are.
        """
        planned = plan_solving(len(variables), quota, max_evaluations)
        enumerated = planned == math.comb(len(variables), quota)
        method = ENUMERATED if enumerated else optimizer or self.settings.optimizer

        def evaluate(bits: Bits, threshold: float | None) -> Value:
            z = self.mask(variables, bits)
            return self.evaluate(z, threshold, name, bits.count(0) == quota)

        problem = Problem(
            num_variables=len(variables),
            quota=quota,
            evaluate=evaluate,
            max_evaluations=planned,
            # Each subproblem has its own.
            seed=random.Random(f"{self.inputs.seed} {name}").randrange(1_000_000),
            starts=tuple(starts),
            most_local=tuple(most_local),
            anchors=self.anchors,
            alpha=self.settings.alpha,
            best_possible=weighted(self.settings.objective, 1.0, 1.0, 0.0),
            exact_values=exact_values,
            end_early_in_nomad=self.settings.nomad_early_end,
        )

        def meets_quota(z: Rows) -> bool:
            return problem.meets_quota(self.bits(variables, z))

        with self.objective.tracking(name, planned, meets_quota):
            found = optimize(method, problem)
        self.z = self.mask(variables, found.bits)
        self.reproducible &= found.trials.reproducible
        self.drawn |= method != ENUMERATED
        for note in found.trials.notes:
            say(f"{name}: {note}")
        layers = tuple(sorted({layer for places in variables for layer, _ in places}))
        value = found.value.value if found.value else None
        evaluations = len(found.trials.table)
        self.steps.append(Step(name, layers, len(variables), quota, method, evaluations, value))
        if found.ended_by is not None:
            raise SearchEnded(found.ended_by)
        return found

    # ------------------------------------------------------------------------------- from and to

    def announce(self, planned: Mapping[str, int]) -> None:
        """What the search will take, before it starts."""
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
                f"; at most {describe_seconds(total * seconds)}, at the {seconds:.2g} s that the "
                "first evaluations took: most need fewer layers and texts"
            )
        say(line)
        for limit in LIMITS:
            if (value := getattr(self.settings, limit)) is not None:
                say(f"it ends with the best mask so far at --{limit.replace('_', '-')} {value:g}")

    @contextmanager
    def until_ended(self) -> Iterator[None]:
        """The block is left where --max-evaluations or --max-hours end the search."""
        try:
            yield
        except SearchEnded as ended:
            self.cut_short = str(ended)
            self.reproducible &= not self.objective.out_of_time


@contextmanager
def open_search(inputs: Inputs, unit: Unit = "group") -> Iterator[Search]:
    """A search at its start: every group full, and the two ends of the score evaluated."""
    settings: SearchSettings = inputs.settings
    # What decides the way of the search: of a file its content, not where it lies.
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
    ) as objective:
        layers, groups = inputs.num_layers, inputs.num_groups
        try:
            anchors = find_anchors(objective, layers, groups, settings.gamma)
        except SearchEnded as ended:
            raise UserError(
                f"{ended} before the dense model and the fully windowed one are scored; allow more."
            ) from None
        budget = inputs.budget if unit == "group" else inputs.layer_budget * groups
        yield Search(inputs, settings, objective, anchors, ((1,) * groups,) * layers, budget, unit)


def plan_solving(num_variables: int, quota: int, max_evaluations: int) -> int:
    """Evaluations of a subproblem: where there are no more candidates than allowed, all of them."""
    return min(math.comb(num_variables, quota), max_evaluations)
