"""What outcomes say of groups: the model that guides swaps, and how sure a mask is."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from bosch.search.certainty import assess
from bosch.search.objective import Means, Value
from bosch.search.optimizers._surrogate import Surrogate

HAYSTACKS = 6
# What windowing each group costs: the second and third are alike, and to haystack 5 group 4 is
# worth more than group 3, to the others less.
COSTS = [0.3, 0.1, 0.1, 0.05, 0.01, 0.0]
OF_HAYSTACK_5 = [0.3, 0.1, 0.1, 0.0, 0.2, 0.0]


def means(bits: tuple[int, ...], haystack: int) -> Means:
    costs = OF_HAYSTACK_5 if haystack == 5 else COSTS
    probability = 1 - sum(cost for cost, bit in zip(costs, bits, strict=True) if not bit)
    return Means(probability, probability, 4 * math.log(probability))


def value(bits: tuple[int, ...], haystacks: int = HAYSTACKS) -> Value:
    outcomes = {haystack: means(bits, haystack) for haystack in range(haystacks)}
    total = sum(one.accuracy for one in outcomes.values()) / haystacks
    return Value(total, haystacks == HAYSTACKS, total, total, 0.0, outcomes)


def masks(windowed: int) -> list[tuple[int, ...]]:
    return [bits for bits in itertools.product((0, 1), repeat=6) if bits.count(0) == windowed]


def test_the_model_of_outcomes_finds_the_effects_and_the_best_swap() -> None:
    current = (0, 1, 1, 0, 1, 0)
    surrogate = Surrogate([1] * HAYSTACKS, 6)
    surrogate.learn(
        {bits: value(bits) for bits in masks(3) if sum(map(int.__ne__, bits, current)) == 2}
    )
    surrogate.learn({current: value(current)})
    effects, present = surrogate.effects(current)
    answered = value(current).haystacks
    assert present == pytest.approx([answered[number].accuracy for number in range(HAYSTACKS)])
    assert effects[0][0] - effects[0][5] == pytest.approx(0.3, abs=0.03)
    assert effects[5][4] - effects[5][3] == pytest.approx(0.2, abs=0.03)
    assert effects[1][4] - effects[1][3] == pytest.approx(-0.04, abs=0.03)
    assert max(surrogate.gains(current))[1:] == (0, 4)


def test_haystacks_that_were_not_read_are_missing_and_not_zero() -> None:
    current = (0, 1, 1, 0, 1, 0)
    near = [bits for bits in masks(3) if sum(map(int.__ne__, bits, current)) == 2]
    whole, part = (Surrogate([1] * HAYSTACKS, 6) for _ in range(2))
    for surrogate, haystacks in ((whole, HAYSTACKS), (part, 2)):
        surrogate.learn({bits: value(bits, haystacks) for bits in near} | {current: value(current)})
    (first, _), (second, _) = whole.effects(current), part.effects(current)
    assert second[0] == pytest.approx(first[0], abs=0.02)
    assert second[0][0] - second[0][5] == pytest.approx(0.3, abs=0.05)


def search_of(z: tuple[tuple[int, ...], ...], **changes: Any) -> Any:
    outcomes = {(bits[:3], bits[3:]): value(bits) for bits in masks(3)}
    facts: dict[str, Any] = {"outcomes": outcomes, "z": z, "unit": "group", "num_windowed": 3}
    facts |= {"num_layers": 2, "num_groups": 3, "settings": SimpleNamespace(objective="accuracy")}
    facts["objective"] = SimpleNamespace(questions=[1] * HAYSTACKS)
    return SimpleNamespace(**facts | changes)


def test_a_mask_is_sure_of_what_all_haystacks_agree_on() -> None:
    certainty = assess(search_of(((1, 1, 1), (0, 0, 0))))
    assert certainty is not None
    flat = [effect for row in certainty.effects for effect in row]
    assert max(flat) == flat[0]
    assert certainty.errors[1][1] > 5 * certainty.errors[0][0]  # group 4, by haystack
    assert certainty.unsure == []
    assert certainty.on_own_half == pytest.approx(certainty.on_other_half, abs=0.01)
    assert "0 of 6 groups" in certainty.line
