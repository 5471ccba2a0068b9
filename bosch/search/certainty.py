"""How sure a mask is, from the outcomes that the search has seen; no further evaluations.

effects    what each group is estimated to add to the quality of the answers, with its error; only
           differences count, since every mask has as many full groups; none if it was not tried
unsure     groups that another draw of the haystacks would put on the other side
stand_ins  swaps that were measured and lose nothing: these groups can replace each other
halves     the best of the evaluated masks on one half of the haystacks, scored on the other half
"""
# M masks, N groups, T haystacks

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bosch.search.objective import Value, Z, weighted
from bosch.search.optimizers._interface import Assignment
from bosch.search.optimizers._surrogate import NEAR, Array, Surrogate
from bosch.search.search import Search

REDRAWS, SPLITS = 200, 100
UNSURE = 0.25  # share of the redraws that change a group's side
MOST_STAND_INS = 8
Group = tuple[int, int]  # layer, group


@dataclass(frozen=True)
class Certainty:
    effects: list[list[float | None]]  # [layer][group]
    errors: list[list[float | None]]  # standard errors over haystacks
    unsure: list[tuple[int, int, float]]  # layer, group, share of the redraws that change it
    stand_ins: list[tuple[Group, Group]]  # a full group and one on the window
    # The objective of masks chosen on one half of the haystacks: there, and on the other half.
    on_own_half: float
    on_other_half: float

    @property
    def line(self) -> str:
        """For the log."""
        return (
            f"how sure: masks picked on half of the haystacks score {self.on_own_half:.3g} there "
            f"and {self.on_other_half:.3g} on the other half; with other haystacks "
            f"{len(self.unsure)} of {sum(map(len, self.effects))} groups could change sides; "
            f"{len(self.stand_ins)} of the swaps tried lose nothing"
        )


def assess(search: Search) -> Certainty | None:
    """None if the search never scored its mask on all haystacks, or chose whole layers."""
    found = search.outcomes.get(search.z)
    if found is None or not found.exact or search.unit == "layer":
        return None
    questions = np.array(search.objective.questions)
    outcomes = {flat(z): value for z, value in search.outcomes.items()}
    current = flat(search.z)
    surrogate = Surrogate(questions.tolist(), len(current))
    surrogate.learn(outcomes)
    effects_TN, _ = surrogate.effects(current)
    share_T = questions / questions.sum()
    effect_N = share_T @ effects_TN
    spread_N = share_T**2 @ (effects_TN - effect_N) ** 2
    error_N = np.sqrt(spread_N * len(questions) / max(1, len(questions) - 1))
    own, other = halves(search, outcomes)
    near = [a for a in outcomes if sum(map(int.__ne__, a, current)) <= NEAR]
    tried_N = np.array([len({a[group] for a in near}) > 1 for group in range(len(current))])

    def table(x_N: Array) -> list[list[float | None]]:
        cells = [
            round(float(x), 4) if tried else None for x, tried in zip(x_N, tried_N, strict=True)
        ]
        each = search.num_groups
        return [cells[start : start + each] for start in range(0, len(cells), each)]

    return Certainty(
        table(effect_N),
        table(error_N),
        [
            (*divmod(group, search.num_groups), round(float(often), 2))
            for group, often in enumerate(changes(current, effects_TN, questions, tried_N))
            if often >= UNSURE
        ],
        stand_ins(search, current, outcomes),
        round(own, 4),
        round(other, 4),
    )


def flat(z: Z) -> Assignment:
    return tuple(bit for row in z for bit in row)


def changes(current: Assignment, effects_TN: Array, questions: Array, tried_N: Array) -> Array:
    """How often each group changes sides when as many haystacks are drawn with replacement: groups
    are swapped as long as one on the window is worth more than a full one, of those tried.
    """
    draw = np.random.default_rng(0)
    full_N = np.array(current, bool)
    often_N = np.zeros(len(current))
    for _ in range(REDRAWS):
        drawn_T = draw.multinomial(len(questions), np.full(len(questions), 1 / len(questions)))
        effect_N = (drawn_T * questions) @ effects_TN
        windowed = sorted(np.flatnonzero(~full_N & tried_N), key=lambda group: -effect_N[group])
        full = sorted(np.flatnonzero(full_N & tried_N), key=lambda group: effect_N[group])
        for inside, outside in zip(windowed, full, strict=False):
            if effect_N[inside] <= effect_N[outside]:
                break
            often_N[[inside, outside]] += 1
    return often_N / REDRAWS


def stand_ins(
    search: Search, current: Assignment, outcomes: Mapping[Assignment, Value]
) -> list[tuple[Group, Group]]:
    """Swaps of the mask scored on all haystacks whose loss is within its error, the best first."""
    own = values_by_haystack(search, outcomes[current])
    found = []
    for assignment, value in outcomes.items():
        changed = [n for n, bit in enumerate(current) if assignment[n] != bit]
        if not value.exact or len(changed) != 2 or sum(assignment) != sum(current):
            continue
        lost_T = own - values_by_haystack(search, value)
        error = lost_T.std(ddof=1) / len(lost_T) ** 0.5 if len(lost_T) > 1 else 0.0
        if lost_T.mean() <= error:
            full, windowed = sorted(changed, key=lambda group: -current[group])
            places = divmod(full, search.num_groups), divmod(windowed, search.num_groups)
            found.append((round(float(lost_T.mean()), 6), places))
    return [places for _, places in sorted(found)[:MOST_STAND_INS]]


def halves(search: Search, outcomes: Mapping[Assignment, Value]) -> tuple[float, float]:
    """Mean value of the best mask of each half of the haystacks, on that half and on the other."""
    masks = [
        a for a, value in outcomes.items() if value.exact and a.count(0) == search.num_windowed
    ]
    values_MT = np.array([values_by_haystack(search, outcomes[mask]) for mask in masks])
    draw, numbers = random.Random(0), list(range(values_MT.shape[1]))
    sums = np.zeros(2)
    for _ in range(SPLITS):
        draw.shuffle(numbers)
        one, two = numbers[::2], numbers[1::2] or numbers[::2]
        best = int(values_MT[:, one].mean(1).argmax())
        sums += values_MT[best, one].mean(), values_MT[best, two].mean()
    own, other = (sums / SPLITS).tolist()
    return own, other


def values_by_haystack(search: Search, value: Value) -> Array:
    """The objective on each haystack."""
    name = search.settings.objective
    return np.array([weighted(name, *means) for _, means in sorted(value.haystacks.items())])
