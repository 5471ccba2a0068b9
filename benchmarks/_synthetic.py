"""Synthetic models for mask searches: what a question loses under a mask is a formula, so that a
search of a thousand masks takes about a second.

A model has layers x groups of some importance. Windowing a group costs each question a share of its
evidence, near the group's importance; a question is answered as long as the loss stays below its
limit. Of two groups that stand in for each other, windowing one costs little and both costs all.

`stand_ins` lets the package's own searches run on such a model: objective, journal, accelerations
and their costs are the real ones; only the scorer and the static rankings are replaced.
"""
# N groups of the model, Q questions

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from bosch.calibration import Calibration, Haystack, Question
from bosch.method import Inputs, Scores, Selection, Table
from bosch.methods import _guided, single_group
from bosch.methods._choose import choose_most_local, make_mask
from bosch.methods._settings import load_method
from bosch.model import ModelInfo
from bosch.run import progress
from bosch.run.errors import UserError
from bosch.run.fingerprint import fingerprint
from bosch.run.group import rank_and_size
from bosch.search import evaluations, finish
from bosch.search.journal import Journal
from bosch.search.objective import Means, Z
from bosch.search.scorer import Answer
from bosch.search.settings import Accelerations
from bosch.search.state_cache import PrefixNumbers

Floats = NDArray[np.float64]
FAMILIES = ("even", "heavy", "published")
WINDOW = 16  # tokens; only a name here
STANDS_IN = 0.8  # share of a group's harm that its partner prevents
SIDE_EFFECT = 0.3  # of windowing any group, against the mean importance of a group
SLOPE = 0.2  # of the log-odds: a question loses its certainty over this share of its limit
LOWEST = 16.0  # no answer's log-probability is below -16: seven digits, guessed
TOP_SHARE = 0.3  # work in the top layer if only the rows of the answers are computed
BY_FORMULA = ("single_group",)  # of the rankings, those that need no attention weights


@dataclass(frozen=True)
class Spec:
    """What determines a synthetic model."""

    num_layers: int
    num_groups: int
    # even: the same importances in each layer, in random order. heavy: log-normal over layers and
    # groups. published: a table of head scores, layers x groups.
    family: str
    pairs: bool  # whether groups stand in for each other
    seed: int
    num_texts: int = 16  # of the calibration set
    num_questions: int = 4  # a text
    num_held_out: int = 64  # texts
    patterns: Path | None = None  # of the family `published`: a file of tab-separated numbers


class SyntheticModel:
    """A model with its calibration set and its held-out set."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.num_layers, self.num_groups = spec, spec.num_layers, spec.num_groups
        draw = self._draws("model")
        importance_LG = self._importance(draw) * draw.lognormal(
            0, 0.5, (self.num_layers, self.num_groups)
        )
        self.importance_N = importance_LG.flatten() / importance_LG.sum()
        size = self.num_layers * self.num_groups
        # Pairs lie among the more important half, an eighth of all groups in each place.
        first = np.argsort(-self.importance_N)[: size // 2]
        some = draw.permutation(first)[: 2 * (size // 8)] if spec.pairs else first[:0]
        self.pairs = some[::2], some[1::2]
        num_texts = spec.num_texts + spec.num_held_out
        weights_QN = np.exp(
            np.repeat(draw.normal(0, 0.5, (num_texts, size)), spec.num_questions, axis=0)
            + draw.normal(0, 0.5, (num_texts * spec.num_questions, size))
        )
        # Windowing a group of no importance helps some questions and harms others.
        weights_QN *= self.importance_N
        weights_QN += draw.normal(0, SIDE_EFFECT / size, weights_QN.shape)
        self._weights_QN = weights_QN / weights_QN.sum(1, keepdims=True)
        # With the less important three quarters on the window, about six of seven questions are
        # answered.
        hard_Q = np.repeat(draw.normal(0, 0.4, num_texts), spec.num_questions)
        hard_Q += draw.normal(0, 0.6, len(hard_Q))
        typical = np.median(
            self.losses(self.mask(self.best_guess(math.ceil(0.75 * size))), slice(None))
        )
        self._limits_Q = typical * np.exp(0.7 - hard_Q)

    def _draws(self, purpose: str) -> np.random.Generator:
        """Random numbers of their own for each purpose, the same with and without pairs."""
        spec = self.spec
        facts = purpose, spec.family, spec.seed, spec.num_layers, spec.num_groups
        return np.random.default_rng(zlib.crc32(str(facts).encode()))

    def _importance(self, draw: np.random.Generator) -> Floats:
        shape = self.num_layers, self.num_groups
        if self.spec.family == "even":
            return draw.permuted(np.tile(0.4 ** np.arange(shape[1]), (shape[0], 1)), axis=1)
        if self.spec.family == "heavy":
            return draw.lognormal(0, 1.3, shape) * draw.lognormal(0, 0.6, (shape[0], 1))
        path = self.spec.patterns
        if self.spec.family != "published" or path is None:
            raise UserError(f"family {self.spec.family}: use even, heavy, or published with a file")
        table: Floats = np.loadtxt(path, ndmin=2)
        if table.shape[0] < shape[0] or table.shape[1] < shape[1]:
            raise UserError(
                f"{path} has {table.shape[0]} x {table.shape[1]} numbers, fewer than the model's "
                f"{shape[0]} x {shape[1]} groups; choose a smaller size."
            )
        for axis in (0, 1):  # some of the layers and of the heads, in their order
            some = np.sort(draw.choice(table.shape[axis], shape[axis], replace=False))
            table = table.take(some, axis)
        return np.maximum(table, 0.02)

    def best_guess(self, budget: int) -> tuple[int, ...]:
        """The less important groups on the window, one of each pair first."""
        rank_N = self.importance_N.copy()
        rank_N[self.pairs[1]] *= 1 - STANDS_IN
        bits_N = np.ones(len(rank_N), int)
        bits_N[np.argsort(rank_N, kind="stable")[:budget]] = 0
        return tuple(bits_N.tolist())

    def mask(self, bits: Sequence[int]) -> Z:
        return tuple(
            tuple(bits[start : start + self.num_groups])
            for start in range(0, len(bits), self.num_groups)
        )

    # ------------------------------------------------------------------------------------ outcomes

    def losses(self, z: Z, questions: slice) -> Floats:
        """The share of its evidence that each question loses."""
        windowed_N = 1.0 - np.array(z, float).reshape(-1)
        lost_N = windowed_N.copy()
        for one, other in (self.pairs, self.pairs[::-1]):
            lost_N[one] *= 1 - STANDS_IN * (1 - windowed_N[other])
        loss_Q: Floats = self._weights_QN[questions] @ lost_N
        return loss_Q

    def log_odds(self, z: Z, questions: slice) -> Floats:
        odds_Q = (1 - self.losses(z, questions) / self._limits_Q[questions]) / SLOPE
        return np.where(odds_Q > 0, odds_Q, LOWEST * np.expm1(np.minimum(odds_Q, 0) / LOWEST))

    def answers(self, z: Z, texts: Sequence[int]) -> list[list[Answer]]:
        """The outcomes of neighboring texts."""
        each = self.spec.num_questions
        odds_Q = self.log_odds(z, slice(texts[0] * each, (texts[-1] + 1) * each))
        logs, right = (-np.logaddexp(0, -odds_Q)).tolist(), (odds_Q > 0).tolist()
        flat = list(map(Answer, right, logs))
        return [flat[start : start + each] for start in range(0, len(flat), each)]

    def score(self, z: Z, held_out: bool = False) -> Means:
        """Accuracy, probability and log-probability over one of the sets."""
        end = self.spec.num_texts * self.spec.num_questions
        odds_Q = self.log_odds(z, slice(end, None) if held_out else slice(end))
        logs_Q = -np.logaddexp(0, -odds_Q)
        parts_Q = (odds_Q > 0, np.exp(logs_Q), logs_Q)
        return Means(*(float(part_Q.mean()) for part_Q in parts_Q))

    def ranking(self, name: str) -> Table:
        """How global a static method finds each group: the importance with much noise, half of
        which all methods share.
        """
        shared_N, own_N = (
            self._draws(purpose).normal(0, 0.5, len(self.importance_N))
            for purpose in ("rankings", name)
        )
        scores_N = self.importance_N * np.exp(shared_N + own_N)
        return tuple(map(tuple, scores_N.reshape(self.num_layers, self.num_groups).tolist()))

    # -------------------------------------------------------------------------- as the package sees

    @cached_property
    def calibration(self) -> Calibration:
        """Texts without words: each holds its number."""
        question = Question(range(1, 2), range(1), "synthetic")
        questions = (question,) * self.spec.num_questions
        texts = range(self.spec.num_texts)
        return Calibration([Haystack(torch.tensor([text, 0]), questions) for text in texts])

    @property
    def info(self) -> ModelInfo:
        mark = fingerprint({name: str(value) for name, value in asdict(self.spec).items()})
        return ModelInfo(
            "synthetic", None, mark, self.num_layers, self.num_groups, self.num_groups, 1
        )

    # What scoring_facts reads of a model.
    config = SimpleNamespace(to_dict=dict)
    device, dtype = torch.device("cpu"), torch.float64


class SyntheticScorer:
    """Takes the place of bosch.search.scorer.Scorer, with an unlimited cache of states."""

    def __init__(
        self,
        model: SyntheticModel,
        calibration: Calibration,
        window_tokens: int,
        accelerations: Accelerations | None = None,
        masks_at_once: int = 1,
    ) -> None:
        self.accelerations = accelerations or Accelerations()
        self.model = model
        self.numbers = [int(haystack.ids_T[0]) for haystack in calibration.haystacks]
        self.num_texts = len(self.numbers)
        self.prefixes = PrefixNumbers()
        rank, size = rank_and_size()
        self.texts: dict[int, set[int]] = {  # the prefixes of masks with cached states
            text: set() for text in range(rank, self.num_texts, size)
        }
        self._last: tuple[Z | None, list[list[Answer]]] = None, []

    def score(self, z: Z, texts: Sequence[int]) -> tuple[dict[int, list[Answer]], float]:
        if self._last[0] != z:
            self._last = z, self.model.answers(z, self.numbers)
        numbers, branch = self.prefixes.visit(z)
        work = sum(self._work(self.texts[text], numbers, branch) for text in texts)
        return {text: self._last[1][text] for text in texts}, work

    def _work(self, cached: set[int], numbers: list[int], branch: int) -> float:
        use, start = self.accelerations, 0
        if use.prefixes:
            start = next((i for i in range(branch, 0, -1) if numbers[i] in cached), 0)
            cached.update(numbers[start + 1 :])
        return len(numbers) - start - (1 - TOP_SHARE if use.answer_rows else 0.0)

    def share(self, texts: Sequence[int], index: int, num_masks: int) -> list[int]:
        return [text for text in texts if text in self.texts]

    def unaccelerated(self) -> "SyntheticScorer":
        plain = copy(self)
        plain.accelerations = Accelerations.none()
        return plain


@contextmanager
def stand_ins(quiet: bool = False) -> Iterator[None]:
    """Inside the block, the package's searches run on synthetic models. If quiet, they print
    nothing and write no journal, which takes half of the time.
    """

    def rank(inputs: Inputs, names: Sequence[str]) -> list[Table]:
        model: Any = inputs.model
        return [model.ranking(name) for name in names]

    replaced: list[tuple[Any, str, object]] = [
        (evaluations, "Scorer", SyntheticScorer),
        (single_group, "Scorer", SyntheticScorer),
        (_guided, "rank_statically", rank),
        (finish, "draw_search", lambda *anything: None),
    ]
    if quiet:
        replaced += [
            (evaluations, "Journal", lambda folder, facts: Journal(None, facts)),
            (progress.logger, "disabled", True),
            (progress, "_console", None),
        ]
    with ExitStack() as stack:
        for module, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


def inputs_of(
    model: SyntheticModel, settings: Any, ratio: float, seed: int, folder: Path
) -> Inputs:
    """What a method is given."""
    return Inputs(
        model_info=model.info,
        load_model=lambda: model,  # type: ignore[arg-type, return-value]
        load_calibration=lambda: model.calibration,
        window_tokens=WINDOW,
        ratio=ratio,
        seed=seed,
        settings=settings,
        folder=folder,
    )


def choose(method: str, inputs: Inputs, quiet: bool = False) -> Selection:
    """The mask of a method. Of those that rank groups by attention weights it is the mask of a
    noisy ranking.
    """
    if hasattr(load_method(method), "score_groups") and method not in BY_FORMULA:
        model: Any = inputs.model
        return choose_most_local(Scores(model.ranking(method), "global"), inputs)
    with stand_ins(quiet):
        return make_mask(method, inputs)
