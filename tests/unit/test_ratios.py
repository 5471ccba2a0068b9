"""Stage 2 and the plan of stage 3: the paper's rules, exact in the ratio and monotone in the drop.

Expected numbers are worked by hand in the specification of the search from algorithm 2, with the
corrected sign; the profiles are what it gives there for the paper's models."""

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bosch.masks.mask import num_windowed
from bosch.run.errors import UserError
from bosch.search.stages import allocate_ratios, hardest_first, plan_subproblems

FIVE = (0.0, 0.25, 0.5, 0.75, 1.0)


def test_layers_that_destroy_the_model_stay_full_and_others_are_raised_in_order() -> None:
    # By hand, L = 3, H = 4: the drops are .02, .35, .05. The paper's line 6 as printed: 0, 1, .5.
    scores = (0.58, 0.60, 0.95)
    assert allocate_ratios(scores, 1.0, 0.5, 4, (0, 0.5, 1)) == (1, 0, 0.5)
    # By hand, L = 4, H = 4: the drops are .29, .06, .20, .05; 6 of 8 after the split, then layers 3
    # and 1 are raised.
    assert allocate_ratios((0.40, 0.69, 0.75, 0.95), 1.0, 0.5, 4) == (0, 0.75, 0.25, 1)


@pytest.mark.parametrize(
    ("layers", "groups", "profiles"),  # at .25, .5, .75 and .875
    [
        (28, 8, ((15, 3, 5, 5, 0), (6, 6, 6, 2, 8), (0, 6, 4, 2, 16), (0, 0, 6, 2, 20))),
        (36, 8, ((21, 1, 7, 7, 0), (8, 7, 7, 5, 9), (0, 8, 5, 2, 21), (0, 0, 8, 2, 26))),
        (40, 8, ((24, 0, 8, 8, 0), (8, 8, 8, 8, 8), (0, 8, 8, 0, 24), (0, 0, 8, 4, 28))),
        (48, 4, ((27, 3, 9, 9, 0), (10, 10, 10, 6, 12), (0, 10, 8, 2, 28), (0, 0, 10, 4, 34))),
        (8, 8, (None, (2, 2, 0, 2, 2), None, None)),  # figure 1
    ],
)
def test_profiles_of_the_papers_models(
    layers: int, groups: int, profiles: tuple[tuple[int, ...] | None, ...]
) -> None:
    scores = [layer / layers for layer in range(layers)]
    for rho, profile in zip((0.25, 0.5, 0.75, 0.875), profiles, strict=True):
        counts = Counter(allocate_ratios(scores, 1.0, rho, groups))
        assert profile in (None, tuple(counts[bucket] for bucket in FIVE))


def test_layers_of_three_groups_need_not_be_whole() -> None:
    """No quarter of them is a whole group: all but whole layers had been left out."""
    # Seven or eight layers each with 0, 1, 2 and 3 groups would be 44 or so; 68 are asked for.
    counts = Counter(round(3 * ratio) for ratio in allocate_ratios(range(30), 30, 0.75, 3))
    assert sum(count * layers for count, layers in counts.items()) == 68
    assert counts[1] + counts[2] > 10


def test_equal_drops_are_ordered_by_the_second_score_and_then_by_depth() -> None:
    assert 0.9 - 0.8 != 0.8 - 0.7  # equal drops are equal although floats are not
    scores = (0.25, 0.5, 0.75)
    for equal in (scores, (0.7, 0.8, 0.9), (0 / 3, 1 / 3, 2 / 3)):
        assert hardest_first(equal, 1.0) == [0, 1, 2]
    assert hardest_first(scores, 1.0, (-5.0, -4.0, -2.0, -1.0)) == [1, 0, 2]  # drops 1, 2, 1
    # Layer 1 drops most on the first score, so the second does not matter.
    assert hardest_first((0.25, 0.5, 1.0), 1.25, (-5.0, -4.0, -1.0, -1.0)) == [1, 0, 2]


GROUPS = st.integers(1, 16)
RHO = st.one_of(st.sampled_from((0.0, 0.25, 0.3, 0.5, 0.75, 0.875, 1.0)), st.floats(0, 1))


@st.composite
def layer_scores(draw: st.DrawFn) -> list[float]:
    """Any scores, or in 64ths like accuracies; for each layer and the dense model."""
    shares = st.integers(0, 64).map(lambda count: count / 64)
    score = draw(st.sampled_from((shares, st.floats(-2, 2))))
    return draw(st.lists(score, min_size=2, max_size=49))


@given(layer_scores(), RHO, GROUPS)
def test_the_ratio_is_exact_and_the_shares_fall_with_the_drop(
    scores: list[float], rho: float, groups: int
) -> None:
    *stage1, dense = scores
    assume(dense > 0)
    ratios = allocate_ratios(stage1, dense, rho, groups)
    counts = [ratio * groups for ratio in ratios]
    assert all(count == round(count) for count in counts)
    assert sum(counts) == num_windowed(rho, len(stage1), groups)
    drops = [before - after for after, before in pairwise(scores)]
    for drop, ratio in zip(drops, ratios, strict=True):
        for other, smaller in zip(drops, ratios, strict=True):
            if other > drop + 1e-12:
                assert smaller <= ratio
    grid = {round(bucket * groups) / groups for bucket in FIVE}
    off_grid = [ratio for ratio in ratios if not any(math.isclose(ratio, b) for b in grid)]
    assert len(off_grid) <= 1


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=6, unique=True).map(sorted),
    st.lists(st.integers(0, 64), min_size=1, max_size=20),
    RHO,
)
def test_uneven_buckets_terminate_too(eighths: list[int], scores: list[int], rho: float) -> None:
    buckets = [eighth / 8 for eighth in eighths]
    windowed = num_windowed(rho, len(scores), 8)
    if eighths[0] * len(scores) <= windowed <= eighths[-1] * len(scores):
        ratios = allocate_ratios(scores, 65, rho, 8, buckets)
        assert sum(ratios) * 8 == windowed
        by_hardness = [ratios[layer] for layer in hardest_first(scores, 65)]
        assert by_hardness == sorted(by_hardness)
    else:
        with pytest.raises(UserError, match="buckets"):
            allocate_ratios(scores, 65, rho, 8, buckets)


def test_subproblems_of_an_example() -> None:
    # By hand, 6 layers of 8, kappa 100: C(8, 6) = 28, C(16, 12) = 1820 > 200 and C(8, 2) = 28.
    plan = plan_subproblems((0.75, 0.25, 1.0, 0.75, 0.0, 1.0), 8, 100, 4)
    assert [(p.layers, p.ratio, p.num_windowed, p.evaluations) for p in plan] == [
        ((2, 5), 1.0, 16, 0),
        ((0, 3), 0.75, 12, 200),
        ((1,), 0.25, 2, 28),
        ((4,), 0.0, 0, 0),
    ]
    # Two layers of 8 at 0.3: 4.8 of 16 groups, not twice 2.4 of 8.
    assert [p.num_windowed for p in plan_subproblems((0.3, 0.3), 8, 100, 4)] == [5]
    assert plan_subproblems((0.5,), 8, 71, 4)[0].evaluations == 70  # C(8, 4)
    assert plan_subproblems((0.5,), 8, 69, 4)[0].evaluations == 69


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 200))
def test_each_layer_is_in_one_part_and_all_fit(counts: list[int], most: int, kappa: int) -> None:
    plan = plan_subproblems([count / 8 for count in counts], 8, kappa, most)
    assert sorted(layer for part in plan for layer in part.layers) == list(range(len(counts)))
    assert sum(part.num_windowed for part in plan) == sum(counts)
    for part in plan:
        assert list(part.layers) == sorted(part.layers)
        assert len(part.layers) <= most
        assert {counts[layer] / 8 for layer in part.layers} == {part.ratio}
        assert part.evaluations <= kappa * len(part.layers)
    assert [part.ratio for part in plan] == sorted((part.ratio for part in plan), reverse=True)
