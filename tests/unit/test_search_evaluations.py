"""Files of outcomes, what a search looks up in them, its limits, and the paper's loss. And scores:
those of the model itself, and the same with each acceleration on or off."""

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bosch.calibration import Calibration, Haystack, Question
from bosch.hybrid.conversion import deploy
from bosch.hybrid.sinks import attach_sink, measure_static_sink
from bosch.method import Inputs
from bosch.run.errors import UserError
from bosch.run.files import STARTED
from bosch.search import score
from bosch.search.objective import (
    WEIGHTS,
    Means,
    SearchEnded,
    Value,
    anchors_between,
    rounded,
    weighted,
)
from bosch.search.optimizers._interface import Problem
from bosch.search.outcomes import FILE, Outcomes
from bosch.search.score import Evaluator, make_evaluator
from bosch.search.settings import NO_ACCELERATIONS, Accelerations, SearchSettings
from bosch.sink import Sink
from tests.attention_matrices import inputs_of
from tests.model_factory import MIXED, families_with, tiny_model
from tests.sampled import sampled
from tests.search_cases import (
    FULL,
    GROUPS,
    LOCAL,
    WINDOW,
    answered_calibration,
    evaluator_of,
    lines_of,
    random_masks,
    score_by_the_model,
    score_of_model,
    small_model,
    stage_one,
    swap_search,
)

OUTCOME = {0: Means(0.5, 0.25, -1.5), 1: Means(1.0, 0.75, -0.5)}
ACCURACY = SearchSettings()


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    model = small_model()
    method: Any = SimpleNamespace(Settings=dict)
    calibration = answered_calibration(model)
    folder = tmp_path / "runs" / "one" / "mask"
    return inputs_of(method, model, calibration, folder, window_tokens=WINDOW)


def search(inputs: Inputs, settings: SearchSettings = ACCURACY) -> tuple[Any, Evaluator]:
    evaluator = make_evaluator(inputs, settings)
    return swap_search(evaluator.score), evaluator


def test_a_text_of_random_tokens_counts_as_the_questions_that_it_says() -> None:
    model = small_model()
    first, second, *_ = answered_calibration(model).haystacks
    places = range(10, len(first.ids_T))
    asked = tuple(Question(range(place, place + 1), range(0), "random text") for place in places)
    mixed = Calibration([first, second, Haystack(first.ids_T, asked, counts_as=1)])
    (value,) = evaluator_of(model, mixed).score([LOCAL])
    parts = [score_by_the_model(model, Calibration([each]), LOCAL) for each in mixed.haystacks]
    weights = [2, 2, 1]  # the others have two questions each
    expected = np.average(parts, axis=0, weights=weights)
    assert (value.accuracy, value.probability, value.log_probability) == pytest.approx(expected)


# ------------------------------------------------------------------------------------ its own file


def test_a_finished_search_needs_no_model(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, first = search(inputs)
    before = (inputs.folder / FILE).read_bytes()
    monkeypatch.setattr(Evaluator, "answers", None)
    repeated, again = search(inputs)
    assert repeated == expected
    assert again.values == first.values
    assert again.cost == first.cost
    assert (inputs.folder / FILE).read_bytes() == before
    assert not (inputs.folder.parents[1] / "shared").exists()  # the folder is not a stage's


def test_damaged_changed_and_missing_lines_are_scored_again(inputs: Inputs) -> None:
    """So are those of another calibration set."""
    expected, first = search(inputs)
    path = inputs.folder / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    line = json.loads(lines[3])
    changed = [line | {"haystacks": {"0": [0, 0, -9]}}, line | {"z": 0.5}]
    damage = [*(json.dumps(each).encode() + b"\n" for each in changed), b"[" * 50_000 + b"\n", b""]
    for content in damage:
        path.write_bytes(b"".join([*lines[:3], content, *lines[4:]]) + lines[0][:30])
        found, again = search(inputs)
        assert found == expected
        assert again.cost.computed == first.cost.computed
        assert path.read_bytes().count(b"\n") == len(lines) + (content != b"") + 1
    path.write_bytes(b"".join(lines))
    other = answered_calibration(small_model(), (40, 33))
    _, again = search(replace(inputs, load_calibration=lambda: other))
    assert again.cost.computed == len(again.values)


# ------------------------------------------------------------------------------------- known masks


def another_stage(inputs: Inputs, name: str, **changes: Any) -> Inputs:
    """The same inputs for the stage of another run."""
    folder = inputs.folder.parents[1] / name / "mask"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STARTED).touch()
    return replace(inputs, folder=folder, **changes)


def test_runs_share_their_outcomes(inputs: Inputs) -> None:
    inputs = another_stage(inputs, "one")
    expected, first = search(inputs)
    second_inputs = another_stage(inputs, "two", seed=1)
    repeated, second = search(second_inputs)
    assert repeated == expected
    assert second.values == first.values  # evaluations of this search, wherever they were computed
    assert second.cost.computed == 0
    runs = [line["run"] for line in lines_of(second_inputs.folder)]
    assert runs == [0] * len(lines_of(inputs.folder))
    assert len(list((inputs.folder.parents[1] / "shared").iterdir())) == 1
    assert search(another_stage(inputs, "three", window_tokens=9))[1].cost.computed > 0
    # The same weights score differently with other rotary frequencies, but not at another path.
    configuration = inputs.model.config
    configuration._name_or_path = "elsewhere"
    assert search(another_stage(inputs, "four"))[1].cost.computed == 0
    configuration.rope_parameters["rope_theta"] *= 2
    assert search(another_stage(inputs, "five"))[1].cost.computed > 0


def test_searches_append_to_one_file_at_once(tmp_path: Path) -> None:
    masks = random_masks(40)

    def add(some: list[Any]) -> None:
        outcomes = Outcomes(tmp_path, "facts")
        for z in some:
            outcomes.add(z, OUTCOME, {"run": 2, "seconds": 1.0, "layer_forwards": 6.0})

    with ThreadPoolExecutor(4) as searches:  # each opens its own files, as processes do
        list(searches.map(add, (masks[start::4] for start in range(4))))
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes() + b'{"z": ["11')  # incomplete: only this line is lost
    add([FULL])
    known = Outcomes(tmp_path, "facts").known
    assert all(known[z] == OUTCOME for z in (*masks, FULL))
    assert Outcomes(tmp_path, "other facts").known == {}


# -------------------------------------------------------------------------- limits, progress, loss


def test_hours_count_over_all_attempts(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the four haystacks takes 500 s."""
    now = [0.0]
    answers = Evaluator.answers

    def answer_slowly(evaluator: Evaluator, *arguments: Any) -> Any:
        now[0] += 500.0
        return answers(evaluator, *arguments)

    monkeypatch.setattr(Evaluator, "answers", answer_slowly)
    monkeypatch.setattr(score.time, "monotonic", lambda: now[0])
    hour = SearchSettings(max_hours=1.0)
    evaluator = make_evaluator(inputs, hour)
    evaluator.score([FULL])
    evaluator = make_evaluator(inputs, hour)
    evaluator.score([FULL])  # from the file
    evaluator.score([LOCAL])
    with pytest.raises(SearchEnded, match="--max-hours 1 "):
        evaluator.score([MIXED])


def test_the_loss_is_that_of_the_paper() -> None:
    """Worked by hand: a = .2, S(1) = .75, gamma = .2, so b = .9 and S = .55 is halfway. 3 of 8
    groups at a ratio of .5 are 1/8 off: 100 / 64."""
    dense, windowed = (Value(value, True, value, 0.0, 0.0) for value in (0.75, 0.2))
    anchors = anchors_between(dense, windowed, gamma=0.2)
    assert (anchors.low, anchors.high, anchors.dense.value) == (0.2, 0.9, 0.75)
    assert anchors.normalized(0.55) == pytest.approx(0.5)
    variables = [((0, group),) for group in range(8)]
    problem = Problem(
        variables=variables, around=((1,) * 8,), quota=4, max_evaluations=1, anchors=anchors
    )
    half, three = (0, 1) * 4, (0, 0, 0, 1, 1, 1, 1, 1)
    assert problem.loss(half, 0.55) == pytest.approx(-0.5)
    assert problem.loss(three, 0.55) == pytest.approx(-0.5 + 100 / 64)


def test_a_calibration_set_that_cannot_rank_masks_is_refused() -> None:
    answers_nothing = Value(0.0, True, 0.0, 0.1, -2.0)
    with pytest.raises(UserError, match=r"niah_single.*objective=logprob"):
        anchors_between(answers_nothing, answers_nothing, 0.2)
    windows_lose_nothing = Value(-2.0, True, 0.5, 0.1, -2.0)
    with pytest.raises(UserError, match=r"-2, .*\(-2\)"):
        anchors_between(windows_lose_nothing, windows_lose_nothing, 0.2)


# --- scores ---


KERNELS = 1e-6  # scores of different kernels may differ by this before rounding
ALL = Accelerations()
NO_MEMO = Accelerations(memo=False)
ONE_OFF = [replace(ALL, **{name: False}) for name, value in vars(ALL).items() if value is True]


@pytest.mark.parametrize(
    ("family", "accelerations"), families_with([NO_ACCELERATIONS, ALL], step=2)
)
@pytest.mark.parametrize("sink", ["none", "static", "tokens=3"])
def test_scores_are_those_of_a_plain_loop(
    family: str, accelerations: Accelerations, sink: str
) -> None:
    # With Gemma's first weights all masks answer all, by one of the sinks.
    model = tiny_model(family, seed=2 if family == "gemma3_text" else 0)
    calibration = answered_calibration(model)
    texts = [haystack.ids_T for haystack in calibration.haystacks]
    measured = measure_static_sink(model, texts)
    attach_sink(model, measured if sink == "static" else Sink.parse(sink))
    evaluator = evaluator_of(model, calibration, "accuracy", accelerations)
    right, logs = set(), set()
    for z in [FULL, LOCAL, MIXED, *random_masks(16)]:
        (value,) = evaluator.score([z])
        accuracy, probability, log_probability = score_by_the_model(model, calibration, z)
        assert value.accuracy == accuracy
        assert value.probability == pytest.approx(probability, abs=1e-5)
        assert value.log_probability == pytest.approx(log_probability, rel=1e-5)
        assert value.value == round(accuracy, 4)
        right.add(accuracy)
        logs.add(round(log_probability, 3))
    assert 1.0 in right
    assert len(right) > 1  # masks differ, so equality means something
    assert len(logs) > 8


@pytest.mark.parametrize(
    ("name", "search"),
    [
        ("accuracy", swap_search),
        pytest.param("logprob", stage_one, marks=pytest.mark.slow),
        pytest.param("accuracy", stage_one, marks=pytest.mark.slow),
        pytest.param("logprob", swap_search, marks=pytest.mark.slow),
    ],
)
def test_a_search_finds_the_same_mask_with_every_switch(name: str, search: object) -> None:
    assert callable(search)
    model = small_model(seed=1)
    calibration = answered_calibration(model)
    expected = search(score_of_model(model, calibration, name))
    little = [replace(ALL, memory_gb=memory) for memory in (0.0, 1e-4)]
    for accelerations in (ALL, *ONE_OFF, NO_ACCELERATIONS, *little):
        evaluator = evaluator_of(model, calibration, name, accelerations)
        assert search(evaluator.score) == expected, accelerations
        assert evaluator.score_unaccelerated(expected[0]).value == expected[1]


@pytest.mark.parametrize(
    ("states", "recomputed"), sampled([(1, 66), (2, 66 - 36), (4, 12), (48, 0)], slice(0, 4, 2))
)
def test_probes_start_at_dense_states_where_a_few_fit(states: int, recomputed: int) -> None:
    """Of 12 layers, from the top, after both ends. The first probe of layer n runs the n layers
    below it (66 in all), or those above the nearest state: with room for 2 states, those of layer
    6 and of the probe, 6 less for each of 6 layers; with room for 4, up to two for each."""
    model = small_model(num_hidden_layers=12)
    calibration, dense = answered_calibration(model, (40,)), ((1,) * GROUPS,) * 12
    masks = [dense, ((0,) * GROUPS,) * 12]
    for layer in reversed(range(12)):
        rows = [tuple(int(group == kept) for group in range(GROUPS)) for kept in range(GROUPS)]
        masks += [(*dense[:layer], row, *dense[layer + 1 :]) for row in rows]
    state_bytes = 40 * model.config.hidden_size * 4
    use = Accelerations(answer_rows=False, memory_gb=(states + 0.5) * state_bytes / (1 << 30))
    cached = evaluator_of(model, calibration, accelerations=use)
    plain = evaluator_of(model, calibration, accelerations=NO_ACCELERATIONS)
    assert [cached.answers(z, 0) for z in masks] == [plain.answers(z, 0) for z in masks]
    assert cached.work == 2 * 12 + GROUPS * sum(range(1, 13)) + recomputed
    assert plain.work == len(masks) * 12


def test_masks_at_once_start_at_the_same_states_as_one_after_another() -> None:
    """With room for a few states only; the threshold is so low that all haystacks are read, in
    turns of one haystack of each mask."""
    model, draw = small_model(num_hidden_layers=12), random.Random(0)
    calibration = answered_calibration(model, (40, 33, 47))
    dense = [(1,) * GROUPS] * 12
    masks = []
    for _ in range(12):
        rows = [list(row) for row in dense]
        for _ in range(3):
            rows[draw.randrange(6, 12)][draw.randrange(GROUPS)] = 0
        masks.append(tuple(map(tuple, rows)))
    state_bytes = 47 * model.config.hidden_size * 4
    use = Accelerations(memory_gb=3 * 8 * state_bytes / (1 << 30))
    work = []
    for count in (1, 4):
        evaluator = evaluator_of(model, calibration, "logprob", use)
        for start in range(0, 12, count):
            evaluator.score(masks[start : start + count], threshold=-60.0)
        work.append(round(evaluator.work, 6))
    assert work[0] == work[1] < 12 * 12 * 3


def test_a_search_without_the_memo_reads_and_finds_the_same() -> None:
    """Whatever it asks for twice, and by which thresholds."""
    model, draw = small_model(), random.Random(0)
    calibration = answered_calibration(model)
    evaluators = [evaluator_of(model, calibration, accelerations=use) for use in (ALL, NO_MEMO)]
    masks = random_masks(8)
    for _ in range(60):
        some, threshold = draw.sample(masks, 2), draw.choice((0.1, 0.2, 0.3, 0.4, 0.5))
        one, other = (evaluator.score(some, threshold) for evaluator in evaluators)
        assert one == other


def test_a_mask_that_stops_early_has_a_valid_bound() -> None:
    model = small_model()
    calibration = answered_calibration(model)
    scores = {z: score_by_the_model(model, calibration, z) for z in random_masks(6)}
    stopped = Counter[str]()
    for name, threshold in product(WEIGHTS, (-20.0, -3.0, 0.3, 0.7)):
        evaluator = evaluator_of(model, calibration, name)
        for z in scores:
            (value,), truth = evaluator.score([z], threshold), weighted(name, *scores[z])
            truths = {rounded(truth + noise) for noise in (-KERNELS, KERNELS)}  # one, or neighbors
            if value.exact:
                assert value.value in truths
            else:
                assert min(truths) <= value.value <= threshold
                assert value.accuracy is value.probability is value.log_probability is None
                stopped[name] += 1
    assert stopped.keys() == WEIGHTS.keys()


def test_a_model_that_cannot_be_scored_is_refused() -> None:
    model = small_model()
    calibration = answered_calibration(model)
    with pytest.raises(UserError, match="attn_implementation='sdpa'"):
        Evaluator(small_model(attention="sdpa"), calibration, WINDOW)
    with pytest.raises(UserError, match="hybrid"):
        Evaluator(deploy(small_model(), MIXED, WINDOW), calibration, WINDOW)
    evaluator = evaluator_of(model, calibration)
    with torch.no_grad():
        model.base_model.layers[2].mlp.down_proj.weight.fill_(float("inf"))
    with pytest.raises(UserError, match="overflow"):
        evaluator.score([MIXED])
