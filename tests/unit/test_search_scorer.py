"""Scores of masks: those of the model itself, and the same with each acceleration on or off."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from bosch.hybrid.conversion import deploy
from bosch.run.errors import UserError
from bosch.search.evaluations import MaskObjective
from bosch.search.objective import WEIGHTS, rounded, weighted
from bosch.search.scorer import Scorer
from bosch.search.settings import Accelerations, SearchSettings
from tests.model_factory import FAMILIES, MIXED, tiny_model
from tests.search_cases import (
    FULL,
    LOCAL,
    WINDOW,
    answered_calibration,
    model_objective,
    objective_of,
    random_masks,
    score_by_the_model,
    small_model,
    stage_one,
    swap_search,
)

KERNELS = 1e-6  # scores of different kernels may differ by this before rounding
ALL = Accelerations()
ONE_OFF = [replace(ALL, **{name: False}) for name, value in vars(ALL).items() if value is True]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("accelerations", [Accelerations.none(), ALL], ids=["none", "all"])
def test_scores_are_those_of_a_plain_loop(family: str, accelerations: Accelerations) -> None:
    model = tiny_model(family)
    calibration = answered_calibration(model)
    objective = objective_of(model, calibration, "accuracy", accelerations)
    seen = set()
    for z in [FULL, LOCAL, MIXED, *random_masks(8)]:
        value = objective(z)
        accuracy, probability, log_probability = score_by_the_model(model, calibration, z)
        assert value.accuracy == accuracy
        assert value.probability == pytest.approx(probability, abs=1e-5)
        assert value.log_probability == pytest.approx(log_probability, rel=1e-5)
        assert value.value == round(accuracy, 4)
        seen.add(accuracy)
    assert 1.0 in seen
    assert len(seen) > 2  # masks differ, so equality means something


@pytest.mark.parametrize("search", [swap_search, stage_one])
@pytest.mark.parametrize("name", ["accuracy", "logprob"])
def test_a_search_finds_the_same_mask_with_every_switch(name: str, search: object) -> None:
    assert callable(search)
    model = small_model(seed=1)
    calibration = answered_calibration(model)
    expected = search(model_objective(model, calibration, name))
    little = [replace(ALL, memory_gb=memory) for memory in (0.0, 1e-4)]
    for accelerations in (ALL, *ONE_OFF, Accelerations.none(), *little):
        objective = objective_of(model, calibration, name, accelerations)
        assert search(objective) == expected, accelerations
        assert objective.score_unaccelerated(expected[0]).value == expected[1]


def test_a_mask_that_stops_early_has_a_valid_bound() -> None:
    model = small_model()
    calibration = answered_calibration(model)
    scorer = Scorer(model, calibration, WINDOW)
    scores = {z: score_by_the_model(model, calibration, z) for z in random_masks(6)}
    for name, threshold in product(WEIGHTS, (-20.0, -3.0, 0.3, 0.7)):
        objective = MaskObjective(scorer, calibration, SearchSettings(objective=name))
        for z in scores:
            value, truth = objective(z, threshold), weighted(name, *scores[z])
            truths = {rounded(truth + noise) for noise in (-KERNELS, KERNELS)}  # one, or neighbors
            if value.exact:
                assert value.value in truths
            else:
                assert min(truths) <= value.value <= threshold
                assert value.accuracy is value.probability is value.log_probability is None


def test_a_model_that_cannot_be_scored_is_refused() -> None:
    model = small_model()
    calibration = answered_calibration(model)
    with pytest.raises(UserError, match="attn_implementation='sdpa'"):
        Scorer(small_model(attention="sdpa"), calibration, WINDOW)
    with pytest.raises(UserError, match="hybrid"):
        Scorer(deploy(small_model(), MIXED, WINDOW), calibration, WINDOW)
    objective = objective_of(model, calibration)
    with torch.no_grad():
        model.base_model.layers[2].mlp.down_proj.weight.fill_(float("inf"))
    with pytest.raises(UserError, match="overflow"):
        objective(MIXED)
