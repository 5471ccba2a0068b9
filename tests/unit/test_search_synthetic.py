"""Optimizers on synthetic models: what a question loses under a mask is a formula, so that a search
of hundreds of masks takes about a second.

A model has 8 layers x 8 groups of heavy-tailed importance. Windowing a group costs each question a
share of its evidence, near the group's importance; a question is answered as long as the loss stays
below its limit. Of two groups that stand in for each other, windowing one costs little and both
costs all."""
# N groups of the model, Q questions

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bosch.search.objective import Anchors, Means, Value
from bosch.search.optimizers._interface import Assignment, Problem, optimize, repair

SIZE, QUOTA = 64, 48  # ratio 0.75
TEXTS, HELD_OUT, QUESTIONS = 16, 64, 4  # questions on each text
STANDS_IN = 0.8  # share of a group's harm that its partner prevents
SLOPE = 0.2  # of the log-odds: a question loses its certainty over this share of its limit

Floats = NDArray[np.float64]


class SyntheticModel:
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

    def evaluate(self, masks: Sequence[Assignment], threshold: float | None) -> list[Value]:
        values = []
        for bits in masks:
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


def test_guided_swaps_find_better_masks_with_as_many_evaluations() -> None:
    """Than swaps in random order from the same rankings, and both than masks at random."""
    better = 0
    for seed in range(6):
        model = SyntheticModel(seed)
        rankings = [model.ranking() for _ in range(4)]
        found = {}
        for optimizer in ("guided", "swap"):
            problem = Problem(
                SIZE,
                QUOTA,
                model.evaluate,
                max_evaluations=92,
                anchors=Anchors(Value(2.0, True, 1.0, 1.0, 0.0), 0.0, 2.4),
                starts=tuple(repair((1,) * SIZE, QUOTA, ranking) for ranking in rankings),
                prior=rankings[0],
                questions=[QUESTIONS] * TEXTS,
            )
            solution = optimize(optimizer, problem)
            assert len(solution.trials.table) == 92
            assert solution.assignment.count(0) == QUOTA
            found[optimizer] = model.held_out(solution.assignment)
        drawn = (repair((1,) * SIZE, QUOTA, model.draw.random(SIZE).tolist()) for _ in range(10))
        assert min(found.values()) > max(map(model.held_out, drawn))
        better += found["guided"] > found["swap"]
    assert better >= 5
