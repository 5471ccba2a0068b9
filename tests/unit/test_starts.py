"""The rankings that `bosch` starts from: scored as every mask is, never above the result, computed
once, and left out where a model does not allow them."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import bosch as library
from bosch.calibration import Calibration
from bosch.config import MaskConfig
from bosch.masks.mask import MaskFile
from bosch.method import Inputs, Scores
from bosch.methods import _choose, bosch, kvzip
from bosch.methods._guided import scores_of
from bosch.methods._settings import load_method
from bosch.run.errors import UserError
from bosch.run.files import STARTED
from bosch.search import finish
from bosch.search.objective import Anchors, Means, Value, rounded, weighted
from bosch.search.optimizers._interface import Problem
from bosch.search.score import Evaluator
from bosch.search.search import optimize
from bosch.search.settings import SearchSettings
from tests.attention_matrices import inputs_of
from tests.search_cases import WINDOW, answered_calibration, lines_of, small_model

STARTS = MaskConfig.starts
OBJECTIVE = bosch.Settings.objective
TINY = Path(library.__file__).parent / "assets" / "tiny-qwen3"


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "draw_search", lambda *anything: None)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the method prints."""
    lines: list[str] = []
    monkeypatch.setattr(bosch, "say", lines.append)
    return lines


@pytest.fixture(scope="module")
def small() -> tuple[PreTrainedModel, Calibration]:
    model = small_model()
    return model, answered_calibration(model)


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, attn_implementation="bosch")
    return model.eval()


def search_inputs(case: Any, folder: Path, **settings: Any) -> Inputs:
    settings = {"kappa": 4} | settings
    return inputs_of(bosch, *case, folder, settings, window_tokens=WINDOW)


def choose(inputs: Inputs) -> MaskFile:
    return _choose.write_selection("bosch", inputs, _choose.make_mask("bosch", inputs), 0.0)


@pytest.mark.parametrize(
    ("seed", "ratios"),
    [
        (0, [0.75]),
        *(pytest.param(n, [0.75, 0.9375], marks=pytest.mark.slow) for n in (0, 1, 2)),
    ],
)
def test_bosch_is_never_below_a_ranking_by_its_own_objective(
    tiny: PreTrainedModel, tmp_path: Path, seed: int, ratios: list[float]
) -> None:
    """On the tiny model, with as many evaluations as the starts, the probes and a few swaps take.
    The rankings choose for themselves here, and another evaluator scores all masks."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tasks = ("niah_single_1", "niah_multikey_1")
    few: dict[str, Any] = {"examples": 4, "length": 256, "questions_per_context": 2}
    calibration = library.calibrate(tokenizer, seed=seed, essays="toy", tasks=tasks, **few)
    for ratio in ratios:
        common: dict[str, Any] = {"ratio": ratio, "window": 32, "sink": "none", "seed": seed}
        masks = {
            name: library.search_mask(tiny, calibration, method=name, **common) for name in STARTS
        }
        masks["bosch"] = library.search_mask(
            tiny, calibration, kappa=4, max_evaluations=80, folder=tmp_path / str(ratio), **common
        )
        evaluator = Evaluator(tiny, calibration, 32, bosch.Settings())
        worth = {name: evaluator.score([mask.mask.z])[0].value for name, mask in masks.items()}
        assert worth["bosch"] >= max(worth.values())
        trace: Any = masks["bosch"].score_trace
        for name in STARTS:  # it started from the masks that the rankings choose
            assert trace["starts"][name]["value"] == pytest.approx(worth[name], abs=1e-4)
        assert trace["evaluations"] <= 80


def test_each_start_is_in_the_trace_in_the_outcomes_and_in_the_log(
    small: Any, tmp_path: Path, said: list[str]
) -> None:
    record = choose(search_inputs(small, tmp_path, until_dense=False))
    (told,) = [line for line in said if line.startswith("starts: ")]
    trace: Any = record.score_trace
    assert list(trace["starts"]) == [*STARTS, "probes", "all together"]
    lines = {line["stage"]: line for line in lines_of(tmp_path)}
    for name, worth in trace["starts"].items():
        parts = [worth[each] for each in ("accuracy", "probability", "log_probability")]
        assert worth["value"] == pytest.approx(weighted(OBJECTIVE, *parts), abs=1e-4)
        if line := lines.get(f"start {name}"):  # a mask that came before has no second line
            assert line["exact"]
            assert rounded(line["value"]) == worth["value"]
        assert f"{name} {worth['value']:.4g}" in told
    # They come before the probes, so that the search may end at any time.
    stages = [line["stage"] for line in lines_of(tmp_path)]
    assert stages.index(f"start {STARTS[0]}") < stages.index("stage 1")


def test_a_search_that_ends_early_has_the_best_start(small: Any, tmp_path: Path) -> None:
    """Two evaluations for both ends, one for each start, none for the probes."""
    record = choose(search_inputs(small, tmp_path, max_evaluations=2 + len(STARTS)))
    trace: Any = record.score_trace
    best = max(worth["value"] for worth in trace["starts"].values())
    hybrid = trace["hybrid"]
    parts = [hybrid[each] for each in ("accuracy", "probability", "log_probability")]
    assert weighted(OBJECTIVE, *parts) == pytest.approx(best, abs=1e-4)


def test_without_starts_the_search_is_as_it_was(small: Any, tmp_path: Path) -> None:
    record = choose(search_inputs(small, tmp_path, starts=()))
    assert "starts" not in dict(record.score_trace or {})
    stages = {line["stage"] for line in lines_of(tmp_path)}
    assert stages == {"anchors", "stage 1", "stage 3"}


def test_a_ranking_that_the_model_does_not_allow_is_left_out_with_a_line(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def refuse(inputs: Inputs) -> None:
        raise UserError("kvzip: 40 positions are too few for a text and its repetition.")

    monkeypatch.setattr(kvzip, "score_groups", refuse)
    trace: Any = choose(search_inputs(small, tmp_path)).score_trace
    assert list(trace["starts"]) == ["razor", "retrieval_head", "fisher", "probes", "all together"]
    assert any("kvzip is left out: kvzip: 40 positions are too few" in line for line in said)


def test_rankings_are_computed_once_for_all_ratios(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = search_inputs(small, tmp_path / "runs" / "a" / "mask")
    inputs.folder.joinpath(STARTED).touch()
    first = {name: scores_of(name, inputs) for name in STARTS}
    other = replace(inputs, ratio=0.75, folder=tmp_path / "runs" / "b" / "mask")
    other.folder.mkdir(parents=True)
    other.folder.joinpath(STARTED).touch()

    def compute_again(inputs: Inputs) -> None:
        raise RuntimeError("computed again")

    for name in STARTS:
        monkeypatch.setattr(load_method(name), "score_groups", compute_again)
        assert replace(first[name], heads=None) == scores_of(name, other)
    another_window = replace(other, window_tokens=WINDOW + 1)
    with pytest.raises(RuntimeError, match="computed again"):
        scores_of("kvzip", another_window)


def test_searches_write_one_ranking_at_once(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found none, computed it, and write it at the same time."""
    together = Barrier(2)
    scores = scores_of("fisher", search_inputs(small, tmp_path / "alone"))

    def score_together(inputs: Inputs) -> Scores:
        together.wait(60)
        return scores

    monkeypatch.setattr(load_method("fisher"), "score_groups", score_together)
    for number in range(30):
        runs = [
            search_inputs(small, tmp_path / f"runs-{number}" / name / "mask") for name in ("a", "b")
        ]
        for run in runs:
            run.folder.joinpath(STARTED).touch()
        with ThreadPoolExecutor(2) as searches:  # each opens its own files, as processes do
            assert [*searches.map(partial(scores_of, "fisher"), runs)] == [scores, scores]


def test_the_time_of_a_ranking_is_its_own_where_another_left_its_examples(
    small: Any, tmp_path: Path
) -> None:
    for name in ("fisher", "razor"):  # razor measures no examples one by one
        inputs = inputs_of(load_method(name), *small, tmp_path, window_tokens=WINDOW)
        selection = _choose.make_mask(name, inputs)
        _choose.write_selection(name, inputs, selection, began=time.monotonic() - 60)
    cost = json.loads((tmp_path / "time.json").read_text())
    assert cost["method"] == "razor"
    assert cost["seconds"] >= 60


def test_a_search_killed_in_a_ranking_ends_in_the_same_bytes(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(search_inputs(small, tmp_path / "whole"))
    done = 0
    score_keys = kvzip.score_keys

    def fail(*arguments: Any) -> torch.Tensor:
        nonlocal done
        done += 1
        if done == 3:
            raise KeyboardInterrupt
        return score_keys(*arguments)

    inputs = search_inputs(small, tmp_path / "killed")
    monkeypatch.setattr(kvzip, "score_keys", fail)
    with pytest.raises(KeyboardInterrupt):
        choose(inputs)
    monkeypatch.setattr(kvzip, "score_keys", score_keys)
    choose(inputs)
    whole, killed = (tmp_path / name / "mask.json" for name in ("whole", "killed"))
    assert whole.read_bytes() == killed.read_bytes()
    examples = (tmp_path / "killed" / "rankings" / "kvzip" / "examples.jsonl").read_text()
    assert [json.loads(line)["index"] for line in examples.splitlines()] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["swap", "guided", "exhaustive"])
def test_ties_of_accuracy_are_broken_by_log_probability(name: str) -> None:
    """All masks answer half of the questions, and one of them with the highest probability."""
    best, asked = (0, 1, 0, 1), []

    def score(masks: Any, threshold: float | None) -> list[Value]:
        asked.extend(masks)
        logs = [-1.0 - sum(a != b for a, b in zip(z[0], best, strict=True)) for z in masks]
        return [Value(0.5, True, 0.5, 0.1, log, {0: Means(0.5, 0.1, log)}) for log in logs]

    settings = SearchSettings(objective="accuracy", optimizer="guided")
    end = Value(1.0, True, 1.0, 1.0, 0.0)
    problem = Problem(
        variables=[((0, group),) for group in range(4)],
        around=((1, 1, 1, 1),),
        quota=2,
        max_evaluations=6,
        anchors=Anchors(end, 0.0, 1.2),
        settings=settings,
        questions=[1],
    )
    assert optimize(name, problem, score).best == best
    as_published = replace(settings, optimizer="nomad")
    first = optimize("exhaustive", replace(problem, settings=as_published), score).best
    assert first == (0, 0, 1, 1)
