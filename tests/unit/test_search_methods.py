"""The methods that search, on a model of three layers of four groups: what each stage does, the
record, limits, and that nothing but the settings and the seed decides the mask."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from traceback import extract_stack
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel

from bosch.attention.backends import sdpa
from bosch.attention.call import AttentionCall
from bosch.calibration import Calibration, Question
from bosch.config import MaskConfig
from bosch.masks.mask import MaskFile
from bosch.methods import _choose, bosch, bosch_paper
from bosch.methods._settings import check_settings, default_settings, load_method
from bosch.plugins import list_plugins, load_plugin
from bosch.run import progress
from bosch.run.errors import UserError
from bosch.search import finish
from bosch.search import settings as search_settings
from bosch.search.objective import Means, rounded, weighted
from bosch.search.settings import Accelerations
from bosch.search.stages import plan_subproblems
from tests.attention_matrices import inputs_of
from tests.search_cases import WINDOW, answered_calibration, lines_of, small_model

SEARCHES = [name for name in list_plugins("bosch.methods") if load_method(name).traits.searches]
FEW = {"kappa": 4}
PACKAGE = Path(sdpa.__file__).parents[2]


@pytest.fixture(scope="module")
def model_and_texts() -> tuple[PreTrainedModel, Calibration]:
    model = small_model()
    return model, answered_calibration(model)


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing would take half of a search's time here; one test undoes this."""
    monkeypatch.setattr(finish, "draw_search", lambda *anything: None)


@pytest.fixture
def run(model_and_texts: tuple[PreTrainedModel, Calibration], tmp_path: Path) -> Any:
    """run(name, folder, **inputs and settings) -> record: a method, with its files."""

    def run_method(name: str, folder: str = "mask", ratio: float = 0.5, **settings: Any) -> Any:
        method = load_plugin("bosch.methods", name)
        all_settings = (FEW if method.traits.searches else {}) | settings
        place, more = (*model_and_texts, tmp_path / folder), {"window_tokens": WINDOW}
        inputs = inputs_of(method, *place, all_settings, ratio=ratio, **more)
        return _choose.write_selection(name, inputs, _choose.make_mask(name, inputs), 0.0)

    return run_method


def trace_of(record: MaskFile) -> dict[str, Any]:
    assert record.score_trace is not None
    return dict(record.score_trace)


def steps_of(record: MaskFile, stage: str) -> list[dict[str, Any]]:
    return [step for step in trace_of(record)["steps"] if step["name"].startswith(stage)]


def test_stage_1_localizes_from_the_top_down_and_stage_3_follows_the_ratios(run: Any) -> None:
    record = run("bosch_paper", kappa=100)
    trace = trace_of(record)
    first = steps_of(record, "stage 1")
    assert [step["layers"] for step in first] == [[2], [1], [0]]
    how = {(step["num_windowed"], step["method"], step["evaluations"]) for step in first}
    assert how == {(2, "exhaustive", 6)}
    assert trace["stage1_scores"] == [step["value"] for step in first[::-1]]
    plan = [p for p in plan_subproblems(trace["ratios"], 4, 100, 8) if p.evaluations]
    third = steps_of(record, "stage 3")
    assert [tuple(step["layers"]) for step in third] == [part.layers for part in plan]
    windowed = [row.count(0) for row in record.mask.z]
    for part in plan:
        assert sum(windowed[layer] for layer in part.layers) == part.num_windowed
    assert sum(windowed) == 6
    assert trace["hybrid"]["accuracy"] == third[-1]["value"]
    assert trace["dense"]["accuracy"] == 1


def test_stage_1_keeps_the_best_mask_of_each_layer(run: Any, tmp_path: Path) -> None:
    """Layers above the current one have the best mask found for them."""
    record = run("bosch_single", kappa=100)
    assert record.seed is None  # everything is enumerated: the seed is not used
    lines = lines_of(tmp_path / "mask")
    for layer in (2, 1, 0):
        tried = [line for line in lines if line["stage"] == f"stage 1, layer {layer}"]
        best = max((line for line in tried if line["exact"]), key=lambda line: line["value"])
        assert record.mask.row_texts()[layer:] == best["z"][layer:]
        assert best["z"][:layer] == ["1111"] * layer


def test_bosch_probes_every_group_and_orders_all_groups(run: Any, tmp_path: Path) -> None:
    """Each probe keeps one group of a layer, and reads a third of the haystacks. Without rankings
    the order of the groups, and the first mask of stage 3, is that of the probes."""
    record = run("bosch", ratio=0.75, starts=(), kappa=8)
    lines = lines_of(tmp_path / "mask")
    probes = [line for line in lines if line["stage"] == "stage 1"]
    kept = [(layer, group) for layer in (2, 1, 0) for group in range(4)]
    for line, (layer, group) in zip(probes, kept, strict=True):
        rows = ["1111"] * 3
        rows[layer] = "".join(str(int(each == group)) for each in range(4))
        assert line["z"] == rows
        assert (list(line["haystacks"]), line["exact"]) == (["0", "3"], False)
    worth = trace_of(record)["group_worth"]
    for layer in range(3):
        logs = [fmean(m[2] for m in p["haystacks"].values()) for p in probes[8 - 4 * layer :][:4]]
        expected = [(4 * log - sum(logs)) / 3 for log in logs]
        assert worth[layer] == pytest.approx(expected, abs=1e-3)
    begun = next(line for line in lines if line["stage"] == "stage 3")
    full = sorted(kept, key=lambda place: worth[place[0]][place[1]])[-3:]
    assert {(layer, group) for layer, group in kept if begun["z"][layer][group] == "1"} == {*full}


def test_probes_tell_groups_apart_by_answers_that_no_mask_makes_likely(
    model_and_texts: tuple[PreTrainedModel, Calibration], tmp_path: Path
) -> None:
    """As lines of text alone are: of 20 tokens a random model has e^-70."""
    model, calibration = model_and_texts
    texts = []
    for haystack in calibration.haystacks:
        length = len(haystack.ids_T)
        asked = Question(range(length - 20, length), range(0), "")
        texts.append(replace(haystack, questions=(asked,)))
    settings = FEW | {"starts": (), "objective": "logprob"}
    inputs = inputs_of(bosch, model, Calibration(texts), tmp_path, settings, window_tokens=WINDOW)
    record = _choose.write_selection("bosch", inputs, _choose.make_mask("bosch", inputs), 0.0)
    worth = [value for row in trace_of(record)["group_worth"] for value in row]
    assert len(set(worth)) > 6


@pytest.mark.parametrize("starts", [(), ("fisher",)])
def test_bosch_tries_all_candidates_where_they_are_few(
    run: Any, tmp_path: Path, starts: tuple[str, ...]
) -> None:
    """At 1/12 and 11/12, 12 masks: patience, of 8 masks at the least, ends none of them early."""
    for ratio in (1 / 12, 11 / 12):
        record = run("bosch", str(ratio), ratio=ratio, starts=starts, kappa=20, until_dense=False)
        (step,) = steps_of(record, "stage 3")
        assert (step["method"], step["evaluations"]) == ("exhaustive", 12)
        windowed = round(12 * ratio)
        lines = lines_of(tmp_path / str(ratio))
        met = [line for line in lines if "".join(line["z"]).count("0") == windowed]
        assert len({str(line["z"]) for line in met}) == 12
        best = max((line for line in met if line["exact"]), key=lambda line: line["value"])
        assert step["value"] == best["value"]


def test_stage_2_uses_the_drops_of_a_negative_score_too(run: Any) -> None:
    trace = trace_of(run("bosch_paper", kappa=100, objective="logprob"))
    dense, scores = trace["dense"], trace["stage1_scores"]
    top = rounded(weighted("logprob", *dense.values()))
    assert top < 0
    drops = [before - after for after, before in pairwise([*scores, top])]
    by_harm = sorted(range(3), key=lambda layer: -drops[layer])
    assert [trace["ratios"][layer] for layer in by_harm] == sorted(trace["ratios"])


def test_multi_takes_several_layers_at_once_and_layer_whole_ones(run: Any) -> None:
    steps = steps_of(run("bosch_multi", max_layers=2), "stage 1")
    assert [step["layers"] for step in steps] == [[2], [0, 1]]
    assert [step["num_windowed"] for step in steps] == [2, 4]
    record = run("bosch_layer", "layers", ratio=1 / 3)
    assert record.mask.unit == "layer"
    (step,) = trace_of(record)["steps"]
    assert (step["method"], step["evaluations"], step["num_variables"]) == ("exhaustive", 3, 3)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("most", [3, 7, 11])
def test_a_search_cut_short_has_an_exact_mask(run: Any, name: str, most: int) -> None:
    record = run(name, ratio=2 / 3, max_evaluations=most)
    trace = trace_of(record)
    assert record.mask.num_windowed == 8
    assert trace["evaluations"] <= most
    assert trace["cut_short"] in (None, f"--max-evaluations {most} is reached")
    assert (trace["cut_short"] is None) == (trace["evaluations"] < most) or name == "bosch_layer"
    assert trace["hybrid"]["accuracy"] is not None


def test_a_search_cut_short_before_its_first_mask_ends_with_what_is_known(run: Any) -> None:
    """That of its first ranking; of no ranking one that takes no layer all its groups."""
    ranking = run("fisher", "fisher").mask.z
    assert run("bosch", "ranked", starts=("fisher",), max_evaluations=2).mask.z == ranking
    spread = run("bosch", "spread", starts=(), max_evaluations=2).mask
    assert [row.count(0) for row in spread.z] == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "ratio", "count"),
    # Of three layers all have the window at .7.
    [("bosch", 0.0, 0), ("bosch", 1.0, 12), ("bosch_layer", 0.7, 12)],
)
def test_nothing_is_searched_where_there_is_no_choice(
    run: Any, name: str, ratio: float, count: int
) -> None:
    record = run(name, ratio=ratio)
    assert (record.mask.num_windowed, record.score_trace) == (count, None)
    assert record.mask.unit == ("layer" if name == "bosch_layer" else "group")


def test_a_search_cut_short_returns_its_best_exact_mask(run: Any, tmp_path: Path) -> None:
    record = run("global_swap", max_evaluations=9)
    lines = lines_of(tmp_path / "mask")
    met = [line for line in lines if "".join(line["z"]).count("0") == 6 and line["exact"]]
    best = max(met, key=lambda line: line["value"])
    assert record.mask.row_texts() == best["z"]


def test_a_limit_within_masks_that_are_proposed_at_once_loses_none(
    run: Any, tmp_path: Path
) -> None:
    several = {"rankings": (), "optimizer": "guided", "masks_at_once": 6}
    for most in range(4, 10):
        record = run("global_swap", str(most), max_evaluations=most, **several)
        lines = lines_of(tmp_path / str(most))
        assert len(lines) == most
        met = [line for line in lines if "".join(line["z"]).count("0") == 6 and line["exact"]]
        best = max(met, key=lambda line: line["value"])
        assert record.mask.row_texts() == best["z"]


@pytest.mark.slow
def test_the_papers_search_ends_with_stage_3_and_keep_best_with_a_better_earlier_mask(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stage 1 alone meets a ratio that is the sum of its groups, and stage 3 starts over."""
    caplog.set_level("INFO", logger="bosch")
    changed = 0
    for kappa in range(2, 7):
        best = trace_of(run("bosch_paper", f"best-{kappa}", kappa=kappa, keep_best=True))
        caplog.clear()
        as_paper = trace_of(run("bosch_paper", f"paper-{kappa}", kappa=kappa))
        lines = lines_of(tmp_path / f"best-{kappa}")
        met = [line["value"] for line in lines if "".join(line["z"]).count("0") == 6]
        assert best["hybrid"]["accuracy"] == pytest.approx(max(met), abs=1e-4)
        assert as_paper["hybrid"] == best.get("last_stage", best["hybrid"])
        assert ("keep_best=True ends with the best" in caplog.text) == ("last_stage" in best)
        changed += "last_stage" in best
    assert changed


def test_settings_come_from_the_mask_section() -> None:
    changed = {"kappa": 7, "alpha": 3, "gamma": 0.1, "max_layers": 2, "ratio_buckets": (0.0, 1.0)}
    settings = default_settings("bosch_paper", MaskConfig(**changed))  # type: ignore[arg-type]
    assert {name: getattr(settings, name) for name in changed} == changed
    assert default_settings("razor", MaskConfig(razor_recent_share=0.1)).razor_recent_share == 0.1
    assert default_settings("proxy", MaskConfig(gamma=0.7)).mass_share == 0.95  # another gamma
    deciding = _choose.deciding(settings)
    assert "kappa" in deciding
    assert "accelerations" not in deciding  # they only affect speed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bosch_paper.Settings(optimizer="swop"), "--optimizer swop: .*'swap'"),
        (lambda: bosch_paper.Settings(kappa=0), "kappa is 0"),
        (lambda: bosch.Settings(accelerations=Accelerations(memory_gb=math.nan)), "memory_gb"),
        (lambda: bosch.check(bosch.Settings(starts=("fischer",))), "--starts fischer.*'fisher'"),
    ],
)
def test_wrong_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_no_time_and_no_nomad_are_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--max-hours 0 "):
        run("bosch_paper", "hours", max_hours=0)
    monkeypatch.setattr(search_settings, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install PyNomadBBO"):
        check_settings("bosch_paper", bosch_paper.Settings())
    assert run("bosch").mask.num_windowed == 6


@pytest.mark.pictures
def test_picture_and_cost_exist(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    run("bosch")
    assert (tmp_path / "mask" / "search.png").read_bytes().startswith(b"\x89PNG")
    cost = json.loads((tmp_path / "mask" / "time.json").read_text())
    assert cost["computed"] > 0
    assert cost["layer_forwards"] > 0


def test_a_mask_comes_to_the_backend_in_ten_frames_of_four_files(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a method's `select` and the backend, for every mask of every part of a search."""
    longest = 0
    attend = sdpa.attend

    def attend_and_count(call: AttentionCall) -> Any:
        nonlocal longest
        frames = [frame for frame in extract_stack() if frame.filename.startswith(str(PACKAGE))]
        names = [frame.name for frame in frames]
        if "score" in names:
            between = frames[names.index("select") + 1 :]
            longest = max(longest, len(between))
            own = {Path(bosch.__file__).name}  # parts of the method itself
            assert len({Path(frame.filename).name for frame in between} - own) <= 4
        return attend(call)

    monkeypatch.setattr(sdpa, "attend", attend_and_count)
    run("bosch", starts=())
    assert longest == 10


def test_the_time_left_of_stage_1_is_right_within_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its probes run more layers from one to the next: with half of them done, the mean of those
    done said a fifth of what was left. The seconds are of a recorded search of the embedded model,
    for the 8 probes of a layer, from the top one down."""
    by_layer, now, told = (0.20, 0.70, 1.61, 2.68, 3.55, 4.39, 5.46, 6.20), [0.0], list[float]()
    costs = [seconds / 8 for seconds in by_layer for _ in range(8)]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(progress, "describe_seconds", lambda seconds: told.append(seconds))
    value = SimpleNamespace(haystacks={0: Means(0.0, 0.0, -1.0)})

    def score(masks: list[Any], bar: progress.Bar, **_: Any) -> list[Any]:
        for _ in masks:
            now[0] += costs[bar.done]
            bar.advance()
            if 6 < bar.done < 64:
                bar.describe_pace()
                assert told[-1] == pytest.approx(sum(costs[bar.done :]), rel=1 / 3)
        return [value] * len(masks)

    search: Any = SimpleNamespace(
        evaluator=SimpleNamespace(questions=[0]),
        anchors=SimpleNamespace(dense=value),
        z=((1,) * 8,) * 8,
        num_layers=8,
        num_groups=8,
        details={},
        score=score,
    )
    bosch.probe_groups(search, share=1.0)
    assert len(told) > 50
