"""The journal, the memo, the limits and the paper's loss."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bosch.method import Inputs
from bosch.run.errors import UserError
from bosch.run.files import STARTED
from bosch.search import evaluations
from bosch.search.evaluations import MaskObjective, open_objective
from bosch.search.journal import FILE
from bosch.search.memo import Memo
from bosch.search.objective import (
    Means,
    SearchEnded,
    Value,
    find_anchors,
)
from bosch.search.optimizers._interface import Problem
from bosch.search.scorer import Scorer
from bosch.search.settings import Accelerations
from tests.attention_matrices import inputs_of
from tests.model_factory import MIXED
from tests.search_cases import (
    WINDOW,
    answered_calibration,
    objective_of,
    random_masks,
    small_model,
    swap_search,
)

FULL, LOCAL = ((1,) * 4,) * 3, ((0,) * 4,) * 3
SCORES = {0: Means(0.5, 0.25, -1.5), 1: Means(1.0, 0.75, -0.5)}


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    model = small_model()
    method: Any = SimpleNamespace(Settings=dict)
    calibration = answered_calibration(model)
    folder = tmp_path / "runs" / "one" / "mask"
    return inputs_of(method, model, calibration, folder, window_tokens=WINDOW)


def search(
    inputs: Inputs, name: str = "accuracy", facts: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, MaskObjective]:
    with open_objective(inputs, name, facts or {"method": "toy"}, **options) as objective:
        return swap_search(objective), objective


def lines_of(inputs: Inputs) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (inputs.folder / FILE).read_text().splitlines()]


# ------------------------------------------------------------------------------------- the journal


def test_a_line_has_everything_about_an_evaluation(inputs: Inputs) -> None:
    with open_objective(inputs, "accuracy", {}) as objective:
        objective(FULL, stage="anchors")
        objective(LOCAL, 0.9, "swaps")
        objective(FULL, 0.9, "swaps")  # known: no evaluation
    header, dense, local = lines_of(inputs)
    assert header["settings"]["search"] == {"objective": "accuracy", "ratio": 0.5, "seed": 0}
    assert (dense["number"], dense["stage"], dense["threshold"]) == (1, "anchors", None)
    assert (dense["z"], dense["exact"]) == (["1111"] * 3, True)
    assert (dense["accuracy"], dense["value"]) == (1, 1)
    assert 0 < dense["probability"] < 1
    assert dense["log_probability"] < 0
    assert dense["cached"] is False
    assert [means[0] for means in dense["texts"].values()] == [1, 1, 1, 1]
    assert dense["layer_forwards"] > 6
    assert dense["seconds"] > 0
    assert (local["number"], local["exact"], local["accuracy"]) == (2, False, None)
    right = [means[0] for means in local["texts"].values()]
    assert len(right) < 4
    assert local["value"] == (sum(right) + 4 - len(right)) / 4 <= 0.9


def test_a_finished_search_is_replayed_without_the_model(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, first = search(inputs)
    before = (inputs.folder / FILE).read_bytes()
    monkeypatch.setattr(Scorer, "score", None)
    repeated, again = search(inputs)
    assert repeated == expected
    assert again.evaluations() == first.evaluations()
    assert again.cost == first.cost
    assert (inputs.folder / FILE).read_bytes() == before


def test_a_journal_of_other_settings_or_with_a_damaged_line_is_refused(inputs: Inputs) -> None:
    with pytest.raises(UserError, match="--objective acuracy"):
        search(inputs, "acuracy")
    search(inputs)
    with pytest.raises(UserError, match=r"search\.objective: accuracy -> probability"):
        search(inputs, "probability")
    with pytest.raises(UserError, match=r"search\.kappa: \(not there\) -> 30"):
        search(inputs, facts={"method": "toy", "kappa": 30})
    with pytest.raises(UserError, match=r"scores\.window_tokens: 8 -> 9"):
        search(replace(inputs, window_tokens=9))
    other = answered_calibration(small_model(), (40, 33))
    with pytest.raises(UserError, match=r"scores\.calibration"):
        search(replace(inputs, load_calibration=lambda: other))
    search(inputs, accelerations=Accelerations.none())  # these change no answer
    assert not (inputs.folder.parents[1] / "shared").exists()  # the folder is not a stage's
    path = inputs.folder / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"{}\n", *lines[4:]]))
    with pytest.raises(UserError, match=rf"{FILE}.*line 4"):
        search(inputs)


def test_a_journal_with_changed_missing_or_moved_lines_is_refused(inputs: Inputs) -> None:
    search(inputs)
    path = inputs.folder / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    line = json.loads(lines[3])
    changed = [(name, value) for name in ("number", "texts", "z") for value in ("x", 0.5)]
    changes = [json.dumps(line | {name: value}).encode() + b"\n" for name, value in changed]
    damaged = [[*lines[:3], change, *lines[4:]] for change in changes]
    damaged += [[*lines[:3], b"[" * 50_000 + b"\n", *lines[4:]], [*lines[:3], *lines[4:]]]
    for content in [*damaged, lines[1:]]:
        path.write_bytes(b"".join(content))
        with pytest.raises(UserError, match=rf"{FILE}.*line [14]"):
            search(inputs)


def test_a_search_that_differs_from_its_journal_reuses_its_scores(inputs: Inputs) -> None:
    with open_objective(inputs, "accuracy", {}) as objective:
        for z in (FULL, MIXED, LOCAL):
            objective(z)
    with open_objective(inputs, "accuracy", {}) as objective:
        for z in (FULL, LOCAL, MIXED):
            objective(z)
        assert objective.evaluations() == 3
        assert objective.cost.computed == 1  # the replayed one
    assert [line["cached"] for line in lines_of(inputs)[4:]] == [True, True]
    with open_objective(inputs, "accuracy", {}) as objective:
        assert objective(FULL).value == 1.0


# ---------------------------------------------------------------------------------------- the memo


def test_scoring_a_mask_again_costs_nothing() -> None:
    model = small_model()
    calibration = answered_calibration(model)
    objective = objective_of(model, calibration)
    values = [objective(z) for z in (FULL, MIXED, FULL, MIXED)]
    assert values[:2] == values[2:]
    assert (objective.evaluations(), objective.cost.computed) == (2, 2)
    without = objective_of(model, calibration, accelerations=Accelerations(memo=False))
    assert [without(z) for z in (FULL, MIXED, FULL, MIXED)] == values
    assert (without.evaluations(), without.cost.computed) == (2, 4)


def test_a_mask_that_stopped_early_is_scored_when_the_threshold_rises() -> None:
    model = small_model()
    objective = objective_of(model, answered_calibration(model))
    bound = objective(LOCAL, 0.9)
    assert not bound.exact
    assert objective(LOCAL, 0.95) == bound  # below 0.9 is below 0.95
    assert objective.cost.computed == 1
    assert objective(LOCAL).exact
    assert objective.evaluations() == 1


def another_stage(inputs: Inputs, name: str, **changes: Any) -> Inputs:
    """The same inputs for the stage of another run."""
    folder = inputs.folder.parents[1] / name / "mask"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STARTED).touch()
    return replace(inputs, folder=folder, **changes)


def test_runs_share_their_scores(inputs: Inputs) -> None:
    inputs = another_stage(inputs, "one")
    exact = Accelerations(early_end=False)  # scores of masks that stopped early are not stored
    expected, first = search(inputs, accelerations=exact)
    second_inputs = another_stage(inputs, "two", seed=1)
    repeated, second = search(second_inputs, accelerations=exact)
    assert repeated == expected
    assert (
        second.evaluations() == first.evaluations()
    )  # counted for this search, wherever they were computed
    assert second.cost.computed == 0
    assert all(line["cached"] for line in lines_of(second_inputs)[1:])
    assert len(list((inputs.folder.parents[1] / "shared").iterdir())) == 1
    third = another_stage(inputs, "three", window_tokens=9)
    assert search(third, accelerations=exact)[1].cost.computed > 0  # another window


def test_an_edited_configuration_shares_no_scores(inputs: Inputs) -> None:
    """The same weights score differently with other rotary frequencies, but not at another path."""
    inputs = another_stage(inputs, "one")
    exact = Accelerations(early_end=False)
    search(inputs, accelerations=exact)
    configuration = inputs.model.config
    configuration._name_or_path = "elsewhere"
    configuration.rope_parameters["rope_theta"] *= 2
    _, second = search(another_stage(inputs, "two"), accelerations=exact)
    assert second.cost.computed == second.evaluations()
    with pytest.raises(UserError, match=r"scores\.configuration\.rope_"):
        search(inputs, accelerations=exact)


def test_searches_append_to_one_memo_at_once(tmp_path: Path) -> None:
    masks = random_masks(40)
    with ThreadPoolExecutor(4) as searches:  # each opens its own files, as processes do
        list(searches.map(lambda start: add_all(tmp_path, masks[start::4]), range(4)))
    path = tmp_path / "scores.jsonl"
    path.write_bytes(path.read_bytes() + b'{"z": ["11')  # incomplete: only this line is lost
    add_all(tmp_path, [FULL])
    memo = Memo(tmp_path, {})
    assert all(memo.get(z) == SCORES for z in (*masks, FULL))


def test_a_changed_line_of_the_memo_is_not_used(tmp_path: Path) -> None:
    add_all(tmp_path, [FULL, MIXED])
    path = tmp_path / "scores.jsonl"
    path.write_text(path.read_text().replace("0.25", "0.75", 1))
    memo = Memo(tmp_path, {})
    assert (memo.get(FULL), memo.get(MIXED)) == (None, SCORES)


def add_all(folder: Path, masks: list[Any]) -> None:
    memo = Memo(folder, {"of": "a test"})
    for z in masks:
        memo.add(z, SCORES)


# -------------------------------------------------------------------------- limits, progress, loss


def test_the_number_of_evaluations_is_limited(inputs: Inputs) -> None:
    with open_objective(inputs, "accuracy", {}, max_evaluations=2) as objective:
        objective(FULL)
        objective(MIXED)
        objective(FULL)
        with pytest.raises(SearchEnded, match="--max-evaluations 2"):
            objective(LOCAL)
        assert objective(MIXED).exact
        assert objective.score_unaccelerated(LOCAL).exact  # the final check is not limited


def test_hours_count_over_all_attempts(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scoring takes 2,000 s."""
    now = [0.0]
    score = Scorer.score

    def score_slowly(scorer: Scorer, *arguments: Any) -> Any:
        now[0] += 2000.0
        return score(scorer, *arguments)

    monkeypatch.setattr(Scorer, "score", score_slowly)
    monkeypatch.setattr(evaluations.time, "monotonic", lambda: now[0])
    with open_objective(inputs, "accuracy", {}, max_hours=1.0) as objective:
        objective(FULL)
    with open_objective(inputs, "accuracy", {}, max_hours=1.0) as objective:
        objective(FULL)  # from the journal
        objective(LOCAL)
        with pytest.raises(SearchEnded, match="--max-hours 1 "):
            objective(MIXED)


def test_progress_counts_evaluations_and_shows_the_best(
    inputs: Inputs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="bosch")

    def run() -> str:
        caplog.clear()
        opened = open_objective(inputs, "accuracy", {})
        with opened as objective, objective.tracking("swaps", 4, counts=lambda z: z != FULL):
            for z in (FULL, LOCAL, FULL, MIXED):
                objective(z)
        return caplog.messages[-1]

    best = max(line["value"] for line in lines_of(inputs)[2:]) if run() else None
    assert run().startswith("swaps: 3 of 4 evaluations (75 %)")
    assert f"best {best:.4g}" in run()


def test_the_loss_is_that_of_the_paper() -> None:
    """Worked by hand: a = .2, S(1) = .75, gamma = .2, so b = .9 and S = .55 is halfway. 3 of 8
    groups at a ratio of .5 are 1/8 off: 100 / 64.
    """

    def given(z: Any, stage: str) -> Value:
        value = 0.75 if z[0][0] else 0.2
        return Value(value, True, value, 0.0, 0.0)

    anchors = find_anchors(given, 2, 4, gamma=0.2)
    assert (anchors.low, anchors.high, anchors.dense.value) == (0.2, 0.9, 0.75)
    assert anchors.normalized(0.55) == pytest.approx(0.5)
    problem = Problem(8, 4, lambda masks, threshold: [], 1, anchors=anchors)
    half, three = (0, 1) * 4, (0, 0, 0, 1, 1, 1, 1, 1)
    assert problem.loss(half, 0.55) == pytest.approx(-0.5)
    assert problem.loss(three, 0.55) == pytest.approx(-0.5 + 100 / 64)
    assert replace(problem, alpha=0).loss(three, 0.55) == pytest.approx(-0.5)


def test_a_calibration_set_that_cannot_rank_masks_is_refused() -> None:
    model = small_model()
    calibration = answered_calibration(model, (30,))
    ids_T = calibration.haystacks[0].ids_T
    for question in calibration.haystacks[0].questions:
        ids_T[question.answer.start] = 0  # never the model's answer
    with pytest.raises(UserError, match="niah_single"):
        find_anchors(objective_of(model, calibration, "accuracy"), 3, 4)


@pytest.mark.parametrize("windowed", [-2.0, -1.0])
def test_a_calibration_set_on_which_windows_lose_nothing_is_refused(windowed: float) -> None:
    def value(z: Any, stage: str) -> Value:
        return Value(-2.0 if z[0][0] else windowed, True, 0.5, 0.5, -2.0)

    with pytest.raises(UserError, match=rf"{windowed:g}, .*\(-2\)"):
        find_anchors(value, 2, 4)


def test_answers_that_are_never_right_still_rank_masks_by_their_probability() -> None:
    def by_logprob(z: Any, stage: str) -> Value:
        return Value(-2.0 if z[0][0] else -3.0, True, 0.0, 0.1, -2.0)

    assert find_anchors(by_logprob, 2, 4).low == -3

    def by_perfect_logprob(z: Any, stage: str) -> Value:
        return Value(0.0 if z[0][0] else -3.0, True, 1.0, 1.0, 0.0)

    assert find_anchors(by_perfect_logprob, 2, 4).low == -3

    def by_accuracy(z: Any, stage: str) -> Value:
        return Value(0.0, True, 0.0, 0.1, -2.0)

    with pytest.raises(UserError, match="objective=logprob"):
        find_anchors(by_accuracy, 2, 4)
