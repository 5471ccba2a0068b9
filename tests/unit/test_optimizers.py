"""The optimizers on problems small enough to know the answer, NOMAD's process when it fails, and
searches on synthetic models: what a question loses under a mask is a formula, so that hundreds of
masks take about a second."""
# N groups of the model, Q questions

import contextlib
import itertools
import math
import os
import random
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bosch.masks.mask import Z
from bosch.plugins import list_plugins
from bosch.run.errors import UserError
from bosch.search import settings
from bosch.search.objective import Anchors, Means, SearchEnded, Value
from bosch.search.optimizers import nomad
from bosch.search.optimizers._interface import (
    PACKAGE,
    Assignment,
    Problem,
    Trials,
    Variable,
    repair,
)
from bosch.search.optimizers.guided import Surrogate
from bosch.search.search import optimize
from tests import fork_server

OPTIMIZERS = list_plugins(PACKAGE)
# Each search of NOMAD's is a process of its own, of seconds.
NOMAD_IN_SLOW = [
    pytest.param(name, marks=pytest.mark.slow if name == "nomad" else ()) for name in OPTIMIZERS
]
DENSE = Value(1.0, True, 1.0, 1.0, 0.0)
ROOT = Path(__file__).parents[2]

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

Score = Callable[[Assignment], float]


def entangled(num_variables: int, seed: int = 0) -> Score:
    """In 64ths: groups count individually and in pairs that back each other up."""
    draw = random.Random(seed)
    alone = [draw.random() for _ in range(num_variables)]
    pairs = [(*draw.sample(range(num_variables), 2), draw.random()) for _ in range(num_variables)]
    most = sum(alone) + sum(weight for _, _, weight in pairs)

    def score(bits: Assignment) -> float:
        total = sum(weight * bit for weight, bit in zip(alone, bits, strict=True))
        total += sum(weight * (bits[i] | bits[j]) for i, j, weight in pairs)
        return round(round(64 * total / most) / 64, 4)

    return score


class Judge:
    """An objective that stops evaluations early as often as it can, and records the masks."""

    def __init__(self, score: Score, end_early: bool = True, ends_after: float = math.inf) -> None:
        self.score, self.end_early, self.ends_after = score, end_early, ends_after
        self.tried: list[Assignment] = []

    def __call__(self, masks: Sequence[Z], threshold: float | None) -> list[Value]:
        return [self.value(bits, threshold) for (bits,) in masks]

    def value(self, bits: Assignment, threshold: float | None) -> Value:
        if len(self.tried) >= self.ends_after:
            raise SearchEnded("enough")
        self.tried.append(bits)
        value = self.score(bits)
        above = threshold is None or value > threshold
        outcome = {0: Means(value, value, math.log(max(value, 1e-9)))} if above else {}
        if self.end_early and not above:
            return Value(threshold or 0.0, False, None, None, None, outcome)
        return Value(value, True, value, value, 0.0, outcome)


def solve(
    name: str,
    judge: Judge,
    variables: int = 8,
    quota: int = 5,
    evaluations: int = 30,
    **more: Any,
) -> Trials:
    """With the groups of one layer as variables."""
    anchors = Anchors(DENSE, judge.score((0,) * variables), 1.2)
    problem = Problem(
        variables=groups(variables),
        around=((1,) * variables,),
        quota=quota,
        max_evaluations=evaluations,
        questions=[64],
        anchors=anchors,
        **more,
    )
    return optimize(name, problem, judge)


def groups(count: int) -> list[Variable]:
    return [((0, group),) for group in range(count)]


def best_of(score: Score, num_variables: int, quota: int) -> float:
    masks = itertools.product((0, 1), repeat=num_variables)
    return max(score(bits) for bits in masks if bits.count(0) == quota)


# --- all optimizers ---


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("quota", "evaluations"), [(0, 3), (1, 3), (5, 20), (8, 3)])
def test_the_quota_and_the_evaluations_are_met(name: str, quota: int, evaluations: int) -> None:
    judge = Judge(entangled(8))
    solution = solve(name, judge, 8, quota, evaluations)
    assert solution.assignment.count(0) == quota
    assert solution.value is not None
    assert solution.value.value == judge.score(solution.assignment)
    # One more where none met it.
    assert len(judge.tried) == len(set(judge.tried)) <= evaluations + 1
    assert solution.reproducible
    assert solution.ended_by is None


@pytest.mark.parametrize("name", NOMAD_IN_SLOW)
def test_the_same_seed_tries_the_same_masks_whatever_ends_early(name: str) -> None:
    tried = []
    for end_early in (True, False, True):
        judge = Judge(entangled(8), end_early)
        solve(name, judge, seed=3)
        tried.append(judge.tried)
    assert tried[0] == tried[1] == tried[2]
    if name == "nomad":
        assert tried[0][0] == (1,) * 8  # the first start, as it is


@pytest.mark.parametrize("name", NOMAD_IN_SLOW)
@pytest.mark.parametrize("seed", range(3))
def test_a_small_space_is_searched_to_its_optimum(name: str, seed: int) -> None:
    judge = Judge(entangled(6, seed))
    solution = solve(name, judge, 6, 3, 60, seed=seed)  # 20 masks meet it, of 64
    assert solution.value is not None
    assert solution.value.value == best_of(judge.score, 6, 3)


def test_a_search_ends_when_its_masks_gain_next_to_nothing() -> None:
    """Counted by hand: of masks that all have the same value only the first pays."""
    level = Judge(lambda bits: 0.5)
    solution = solve("guided", level, evaluations=30, patience=4)
    assert len(level.tried) == 1 + 4
    assert "the last 4 masks have not raised the value by 0.002" in solution.notes[0]
    assert solution.ended_by is None  # no limit of the user's cut it short

    without = Judge(lambda bits: 0.5)
    solve("guided", without, evaluations=30)
    assert len(without.tried) == 30
    # Masks that rise by a 64th now and then pay for those between.
    rising = Judge(entangled(8))
    solution = solve("guided", rising, evaluations=30, patience=4)
    values = [rising.score(bits) for bits in rising.tried]
    assert solution.value is not None
    assert values.index(solution.value.value) == len(values) - 1 - 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_search_that_is_ended_keeps_its_best_mask(name: str) -> None:
    whole, cut = Judge(entangled(8)), Judge(entangled(8), ends_after=12)
    solve(name, whole)
    solution = solve(name, cut)
    assert solution.ended_by == "enough"
    assert cut.tried == whole.tried[:12]
    tried = [cut.score(bits) for bits in cut.tried if bits.count(0) == 5]
    assert solution.assignment.count(0) == 5
    assert (solution.value.value if solution.value else None) == max(tried, default=None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_value_that_is_enough_ends_the_search_with_its_mask(name: str) -> None:
    whole, short = Judge(entangled(8)), Judge(entangled(8))
    solve(name, whole)
    values = [whole.score(bits) for bits in whole.tried if bits.count(0) == 5]
    enough = sorted(values)[len(values) // 2]
    solution = solve(name, short, enough=enough)
    meets = [bits.count(0) == 5 and whole.score(bits) >= enough for bits in whole.tried]
    assert short.tried == whole.tried[: meets.index(True) + 1]
    assert solution.assignment == short.tried[-1]
    assert solution.ended_by is None


# --- one optimizer ---


def test_swap_leaves_a_local_optimum() -> None:
    """The only better mask is two swaps from the start; every neighbor is worse."""
    best = (1, 1, 1, 0, 0, 0)
    start = (0, 0, 1, 1, 1, 0)
    values = {best: 1.0, start: 0.5}
    judge = Judge(lambda bits: values.get(bits, 0.1 if any(bits) else 0.0))
    solution = solve("swap", judge, 6, 3, 20, starts=(start,))
    assert solution.assignment == best


# --- the model of outcomes that guides swaps ---

# What windowing each group costs: the second and third are alike, and to haystack 5 group 4 is
# worth more than group 3, to the others less.
COSTS = [0.3, 0.1, 0.1, 0.05, 0.01, 0.0]
OF_HAYSTACK_5 = [0.3, 0.1, 0.1, 0.0, 0.2, 0.0]
CURRENT = (0, 1, 1, 0, 1, 0)


def surrogate_of(haystacks: int) -> Surrogate:
    """It has seen CURRENT, and this many of the six haystacks under each mask a swap away."""

    def value(bits: Assignment, count: int) -> Value:
        outcome = {}
        for haystack in range(count):
            costs = OF_HAYSTACK_5 if haystack == 5 else COSTS
            left = 1 - sum(cost for cost, bit in zip(costs, bits, strict=True) if not bit)
            outcome[haystack] = Means(left, left, 4 * math.log(left))
        return Value(0.0, count == 6, None, None, None, outcome)

    surrogate = Surrogate([1] * 6, 6)
    for bits in itertools.product((0, 1), repeat=6):
        if bits.count(0) == 3 and sum(map(int.__ne__, bits, CURRENT)) == 2:
            surrogate.learn({bits: value(bits, haystacks)})
    surrogate.learn({CURRENT: value(CURRENT, 6)})
    return surrogate


def test_the_model_of_outcomes_finds_effects_and_haystacks_not_read_are_missing_not_zero() -> None:
    surrogate = surrogate_of(6)
    whole, present = surrogate.effects(CURRENT)
    assert present == pytest.approx([0.65] * 5 + [0.7])
    assert whole[0][0] - whole[0][5] == pytest.approx(0.3, abs=0.03)
    assert whole[5][4] - whole[5][3] == pytest.approx(0.2, abs=0.03)
    assert whole[1][4] - whole[1][3] == pytest.approx(-0.04, abs=0.03)
    assert max(surrogate.gains(CURRENT))[1:] == (0, 4)  # the best swap
    part, _ = surrogate_of(2).effects(CURRENT)
    assert part[0] == pytest.approx(whole[0], abs=0.02)
    assert part[0][0] - part[0][5] == pytest.approx(0.3, abs=0.05)


# --- NOMAD's process ---


def dying(judge: Judge, at: int, end: Callable[[int], None]) -> Judge:
    """The same, but `end` ends NOMAD's process when it requests mask number `at`."""
    score = judge.score

    def evaluate(bits: Assignment) -> float:
        if len(judge.tried) == at:
            end(nomad_process())
        return score(bits)

    judge.score = evaluate
    return judge


def nomad_process() -> int:
    """The one child of this process that runs NOMAD."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (pid,) = [c for c in children if "_nomad_child" in Path(f"/proc/{c}/cmdline").read_text()]
    return int(pid)


@on_linux
def test_a_dead_nomad_only_costs_the_rest_of_its_evaluations() -> None:
    judge = dying(Judge(entangled(8)), 20, lambda pid: os.kill(pid, signal.SIGKILL))
    solution = solve("nomad", judge, evaluations=60, starts=((0,) * 5 + (1,) * 3,))
    (note,) = solution.notes
    assert "SIGKILL" in note
    assert not solution.reproducible
    tried = [bits for bits in judge.tried if bits.count(0) == 5]
    assert solution.value is not None
    assert solution.value.value == max(map(entangled(8), tried))


@on_linux
def test_a_hung_nomad_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nomad, "HUNG_SECONDS", 2.0)
    judge = dying(Judge(entangled(8)), 5, lambda pid: os.kill(pid, signal.SIGSTOP))
    solution = solve("nomad", judge, evaluations=60)
    assert "2 s" in solution.notes[0]
    assert not solution.reproducible
    assert solution.assignment.count(0) == 5


@on_linux
def test_ctrl_c_ends_the_search_and_nomad_with_it() -> None:
    seen: list[int] = []

    def interrupt(pid: int) -> None:
        seen.append(pid)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        solve("nomad", dying(Judge(entangled(8)), 5, interrupt), evaluations=60)
    assert not Path(f"/proc/{seen[0]}").exists()


def killed_search(note: Path) -> None:
    def die(pid: int) -> None:
        note.write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)

    solve("nomad", dying(Judge(entangled(8)), 5, die), evaluations=60)


@on_linux
@pytest.mark.faults
def test_nomad_does_not_outlive_a_killed_search(tmp_path: Path) -> None:
    process = fork_server.start(killed_search, tmp_path / "pid")
    process.join(fork_server.PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):  # it has already ended
        child = os.pidfd_open(int((tmp_path / "pid").read_text()))
        assert select.select([child], [], [], 60)[0]  # readable once the process has ended
        os.close(child)


def test_without_nomad_swap_works_and_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install PyNomadBBO.*--optimizer swap"):
        solve("nomad", Judge(entangled(8)))
    assert solve("swap", Judge(entangled(8))).value is not None


# --- synthetic models ---


SIZE, QUOTA = 64, 48  # ratio 0.75
TEXTS, HELD_OUT, QUESTIONS = 16, 64, 4  # questions on each text
STANDS_IN = 0.8  # share of a group's harm that its partner prevents
SLOPE = 0.2  # of the log-odds: a question loses its certainty over this share of its limit

Floats = NDArray[np.float64]


class SyntheticModel:
    """8 layers x 8 groups of heavy-tailed importance. Windowing a group costs each question a share
    of its evidence, near the group's importance; a question is answered as long as the loss stays
    below its limit. Of two groups that stand in for each other, windowing one costs little and both
    costs all."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = np.random.default_rng(seed)
        importance_LG = draw.lognormal(0, 1.4, (8, 8)) * draw.lognormal(0, 0.6, (8, 1))
        self.importance_N = importance_LG.flatten() / importance_LG.sum()
        # Pairs lie among the more important half.
        some = draw.permutation(np.argsort(-self.importance_N)[: SIZE // 2])[: SIZE // 4]
        self.pairs = some[::2], some[1::2]
        num_texts = TEXTS + HELD_OUT
        noise_QN = np.repeat(draw.normal(0, 0.5, (num_texts, SIZE)), QUESTIONS, axis=0)
        noise_QN += draw.normal(0, 0.5, noise_QN.shape)
        weights_QN = self.importance_N * np.exp(noise_QN)
        # Windowing a group of no importance helps some questions and harms others.
        weights_QN += draw.normal(0, 0.3 / SIZE, weights_QN.shape)
        self.weights_QN = weights_QN / weights_QN.sum(1, keepdims=True)
        # With the less important three quarters on the window about six of seven are answered.
        hard_Q = np.repeat(draw.normal(0, 0.4, num_texts), QUESTIONS)
        hard_Q += draw.normal(0, 0.6, len(hard_Q))
        local = repair((1,) * SIZE, QUOTA, self.importance_N.tolist())
        self.limits_Q = np.median(self.losses(local)) * np.exp(0.7 - hard_Q)

    def losses(self, bits: Assignment) -> Floats:
        """The share of its evidence that each question loses."""
        windowed_N = 1.0 - np.array(bits)
        lost_N = windowed_N.copy()
        for one, other in (self.pairs, self.pairs[::-1]):
            lost_N[one] *= 1 - STANDS_IN * (1 - windowed_N[other])
        loss_Q: Floats = self.weights_QN @ lost_N
        return loss_Q

    def outcomes(self, bits: Assignment) -> list[Means]:
        """Of each text: those of the search, then the held-out ones."""
        odds_Q = (1 - self.losses(bits) / self.limits_Q) / SLOPE
        logs_Q = np.maximum(-np.logaddexp(0, -odds_Q), -16.0)
        parts = np.stack([odds_Q > 0, np.exp(logs_Q), logs_Q], 1).reshape(-1, QUESTIONS, 3)
        return [Means(*means) for means in parts.mean(1).tolist()]

    def score(self, masks: Sequence[Z], threshold: float | None) -> list[Value]:
        values = []
        for (bits,) in masks:
            texts = dict(enumerate(self.outcomes(bits)[:TEXTS]))
            means = Means(*np.mean(list(texts.values()), 0).tolist())
            value = round(means.accuracy + means.probability, 4)
            values.append(Value(value, True, *means, texts))
        return values

    def held_out(self, bits: Assignment) -> float:
        return sum(text.accuracy + text.probability for text in self.outcomes(bits)[TEXTS:])

    def ranking(self) -> list[float]:
        """How global a static method finds each group: the importance with much noise."""
        noisy_N: Floats = self.importance_N * np.exp(self.draw.normal(0, 0.7, SIZE))
        return noisy_N.tolist()


@pytest.mark.parametrize(
    ("seeds", "fewest"), [(range(3), 3), pytest.param(range(6), 5, marks=pytest.mark.slow)]
)
def test_guided_swaps_find_better_masks_with_as_many_evaluations(seeds: range, fewest: int) -> None:
    """Than swaps in random order from the same rankings, and both than masks at random."""
    better = 0
    for seed in seeds:
        model = SyntheticModel(seed)
        rankings = [model.ranking() for _ in range(4)]
        found = {}
        for optimizer in ("guided", "swap"):
            problem = Problem(
                variables=groups(SIZE),
                around=((1,) * SIZE,),
                quota=QUOTA,
                max_evaluations=92,
                anchors=Anchors(Value(2.0, True, 1.0, 1.0, 0.0), 0.0, 2.4),
                starts=tuple(repair((1,) * SIZE, QUOTA, ranking) for ranking in rankings),
                prior=rankings[0],
                questions=[QUESTIONS] * TEXTS,
            )
            solution = optimize(optimizer, problem, model.score)
            assert len(solution.table) == 92
            assert solution.assignment.count(0) == QUOTA
            found[optimizer] = model.held_out(solution.assignment)
        drawn = (repair((1,) * SIZE, QUOTA, model.draw.random(SIZE).tolist()) for _ in range(10))
        assert min(found.values()) > max(map(model.held_out, drawn))
        better += found["guided"] > found["swap"]
    assert better >= fewest
