"""At least so many full groups in every layer, in searches and rankings."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from bosch.calibration import Calibration
from bosch.config import Config, MaskConfig
from bosch.masks.formats import smallest
from bosch.masks.mask import num_windowed
from bosch.masks.ranks import ranks_of
from bosch.methods import _choose
from bosch.methods._settings import check_min_full, load_method
from bosch.run.errors import UserError
from bosch.search import finish, mask_stage
from bosch.search.optimizers._interface import repair
from tests.attention_matrices import inputs_of
from tests.search_cases import WINDOW, answered_calibration, lines_of, small_model


@pytest.fixture(scope="module")
def case() -> tuple[PreTrainedModel, Calibration]:
    model = small_model()
    return model, answered_calibration(model)


def choose(name: str, case: Any, folder: Path, least: int, ratio: float, **settings: Any) -> Any:
    more: dict[str, Any] = {"window_tokens": WINDOW, "ratio": ratio, "min_full_per_layer": least}
    inputs = inputs_of(load_method(name), *case, folder, settings, **more)
    return _choose.write_selection(name, inputs, _choose.make_mask(name, inputs), 0.0)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bosch", {"kappa": 8}),
        ("bosch", {"kappa": 8, "max_evaluations": 3}),  # cut short before any mask
        ("global_swap", {"kappa": 6, "rankings": ("fisher",)}),
        ("global_swap", {"kappa": 6, "rankings": (), "optimizer": "guided"}),
        ("fisher", {}),
        ("retrieval_head", {}),
        *(
            pytest.param("bosch", settings, marks=pytest.mark.slow)
            for settings in (
                {"kappa": 8, "starts": (), "until_dense": False},
                {"effort": 3, "kappa": 25},  # at .75 enumerated
            )
        ),
    ],
)
def test_every_layer_keeps_a_full_group(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: Any
) -> None:
    """At .75 of three layers of four groups one full group each is all there is, at 2/3 one more;
    the masks that a search tries on its way have them too."""
    monkeypatch.setattr(finish, "draw_search", lambda *anything: None)
    for ratio, full in ((0.75, 3), (2 / 3, 4)):
        folder = tmp_path / str(full)
        record = choose(name, case, folder, 1, ratio, **settings)
        rows = record.mask.z
        assert sum(map(sum, rows)) == full
        assert min(map(sum, rows)) == 1
        assert record.settings["min_full_per_layer"] == 1
        # What stage 2 gives to the layers, where it was reached.
        is_cut = "max_evaluations" in settings
        if name == "bosch" and not is_cut:
            assert record.score_trace is not None
            assert max(record.score_trace["ratios"]) == 0.75
        if load_method(name).traits.searches:
            tried = [
                line["z"] for line in lines_of(folder) if line["stage"] in ("stage 3", "swaps")
            ]
            assert bool(tried) != is_cut
            assert all("1" in row for z in tried for row in z)


def test_without_the_setting_nothing_is_written_of_it(case: Any, tmp_path: Path) -> None:
    assert "min_full_per_layer" not in choose("fisher", case, tmp_path, 0, 0.75).settings
    usual = Config(method="interleave", model="tiny-qwen3")
    stage: Any = mask_stage.stage(replace(usual, sink="none"), None, None)  # type: ignore[arg-type]
    assert "min_full_per_layer" not in stage.settings


def test_the_most_global_group_of_each_layer_stays() -> None:
    """By hand: of layer 1 all are more local than any of layer 0, and 5.0 stays all the same."""
    table = [[9.0, 8.0, 7.0], [5.0, 1.0, 2.0]]
    windowed, tie = smallest(table, 3, seed=0, least_full=1)
    assert (sorted(windowed), tie) == ([(0, 2), (1, 1), (1, 2)], None)
    prior = list(itertools.chain(*table))
    assert repair((1,) * 6, 3, prior, [0, 0, 0, 1, 1, 1], 1) == (1, 1, 0, 1, 0, 0)
    assert repair((1,) * 6, 3, prior) == (1, 1, 1, 0, 0, 0)


def test_of_equal_groups_the_first_layers_are_no_more_local() -> None:
    """A ranking that gives 0 to most groups, as one by copies does."""
    assert ranks_of([0.0, 3.0, 0.0, 0.0, 2.0]).tolist() == [1, 4, 1, 1, 3]
    prior = [0.0] * 60 + [1.0] * 30
    windowed = [v for v, bit in enumerate(repair((1,) * 90, 30, prior)) if not bit]
    assert max(windowed) < 60
    assert 10 < sum(v < 30 for v in windowed) < 20
    assert windowed == [v for v, bit in enumerate(repair((1,) * 90, 30, prior)) if not bit]


@pytest.mark.parametrize(
    ("name", "least", "ratio", "settings", "problem"),
    [
        ("bosch", 1, 0.8, {}, r"needs 3 full groups in 3 layers, but --ratio 0.8 leaves 2.*0\.75"),
        ("fisher", 3, 0.5, {}, r"needs 9 full groups.*leaves 6; choose a ratio of up to 0\.25"),
        ("fisher", 5, 0.0, {}, "layers have 4 groups; choose up to 4"),
        ("bosch_paper", 1, 0.5, {}, "method bosch_paper cannot keep full groups"),
        ("interleave", 1, 0.5, {}, "method interleave cannot keep"),
        ("bosch", 1, 0.5, {"optimizer": "nomad"}, "the optimizer may leave the ratio"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    case: Any, tmp_path: Path, name: str, least: int, ratio: float, settings: Any, problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        choose(name, case, tmp_path, least, ratio, **settings)


def test_the_ratio_that_is_proposed_is_accepted() -> None:
    """Also where it has no end, as 2/3 of 30 layers of 3 groups."""
    settings = load_method("fisher").Settings()
    for layers, groups in itertools.product((1, 8, 30, 126), range(1, 17)):
        for least in range(1, groups + 1):
            shape = layers, groups
            with pytest.raises(UserError) as refused:
                check_min_full("fisher", settings, least, 1.0, shape)
            ratio = float(str(refused.value).removesuffix(".").split()[-1])
            check_min_full("fisher", settings, least, ratio, shape)
            assert num_windowed(ratio, *shape) == layers * (groups - least)


def test_a_run_is_refused_before_work_begins() -> None:
    config = Config(
        method="bosch", model="tiny-qwen3", sink="none", mask=MaskConfig(min_full_per_layer=1)
    )
    with pytest.raises(UserError, match="needs 8 full groups in 8 layers"):
        mask_stage.stage(replace(config, ratio=0.9375), None, None)  # type: ignore[arg-type]
