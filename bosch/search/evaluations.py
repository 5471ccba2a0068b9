"""The objective of a search: it takes a mask, returns its value, and writes each evaluation to the
journal before the search continues.

    with open_objective(inputs, "accuracy", {"kappa": 100}) as objective:
        with objective.tracking("stage 1", planned=224):
            value = objective(z, threshold=best.value, stage="stage 1, layer 7")

Given the values, a search is deterministic: after a kill it replays its journal and continues as if
nothing had happened. With several ranks each runs the whole search, and every call is collective.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from bosch.calibration import Calibration
from bosch.method import Inputs
from bosch.run.group import agree, gather, joined, rank_and_size
from bosch.run.progress import Bar, track
from bosch.search.journal import Journal, Line, z_to_texts
from bosch.search.memo import Memo, locate_memo, scoring_facts
from bosch.search.objective import (
    Means,
    SearchEnded,
    Value,
    Z,
    check_objective,
    rounded,
    weighted,
)
from bosch.search.scorer import Answer, Scorer
from bosch.search.settings import Accelerations

NEWEST_SHARE = 0.3  # weight of the newest loss in the moving average of a text's losses
PERFECT = Answer(True, 0.0)


@dataclass
class Cost:
    """The cost of a search, over all attempts and ranks."""

    computed: int = 0  # evaluations that ran the model
    texts: int = 0  # texts they ran it on
    layer_forwards: float = 0.0  # layers x texts; a part of a layer counts its share (layers.py)
    evaluation_seconds: float = 0.0  # wall time

    def add(self, line: Line) -> None:
        self.computed += not line["cached"]
        self.texts += len(line["losses"])
        self.layer_forwards += line["layer_forwards"]
        self.evaluation_seconds += line["seconds"]


@contextmanager
def open_objective(
    inputs: Inputs,
    name: str,
    facts: Mapping[str, object],
    accelerations: Accelerations | None = None,
    max_evaluations: int | None = None,
    max_hours: float | None = None,
) -> "Iterator[MaskObjective]":
    """The objective for a method's inputs, with its journal in the stage's folder.

    facts: what determines the course of the search besides model, calibration set, window, ratio
    and seed. A journal with other facts is refused. The limits are not facts: they only end it.
    """
    check_objective(name)
    accelerations = accelerations or Accelerations()
    with joined():
        model, calibration = inputs.model, inputs.calibration
        scored = scoring_facts(model, inputs.model_info, calibration, inputs.window_tokens)
        searched = {"ratio": inputs.ratio, "seed": inputs.seed, "objective": name, **facts}
        objective = MaskObjective(
            Scorer(model, calibration, inputs.window_tokens, accelerations),
            calibration,
            name,
            Journal(inputs.folder, {"scores": scored, "search": searched}),
            Memo(locate_memo(inputs.folder, scored) if accelerations.memo else None, scored),
            max_evaluations,
            max_hours,
        )
        try:
            yield objective
        finally:
            objective.journal.close()


class MaskObjective:
    """Scores masks. Collective: every rank calls it with the same masks in the same order."""

    def __init__(
        self,
        scorer: Scorer,
        calibration: Calibration,
        name: str,
        journal: Journal | None = None,
        memo: Memo | None = None,
        max_evaluations: int | None = None,
        max_hours: float | None = None,
    ) -> None:
        self.name, self.num_examples = name, calibration.num_questions
        self.cost = Cost()
        self.out_of_time = False
        self.journal = journal or Journal(None, {})
        self._scorer, self._memo = scorer, memo or Memo(None, {})
        self._max_evaluations, self._max_hours = max_evaluations, max_hours
        self._began, self._earlier_seconds = time.monotonic(), 0.0
        self._scored: set[Z] = set()
        self._known: dict[Z, Value] = {}  # exact, or the lowest bound so far
        self._expected_losses = [0.0] * scorer.num_texts
        self._number = 0
        self._bar: Bar | None = None
        self._counts: Callable[[Z], bool] = lambda z: True
        self._best = -math.inf  # since tracking began

    def __call__(self, z: Z, threshold: float | None = None, stage: str = "") -> Value:
        """Without a threshold the value is exact. With one, the evaluation may stop as soon as the
        value cannot exceed it.

        Accept a mask if `value > threshold`. Do not use the value of one that stopped early for
        anything else: where it stops depends on the accelerations.
        """
        known = self._known.get(z) if self._scorer.accelerations.memo else None
        if known and (known.exact or (threshold is not None and known.value <= threshold)):
            return known
        line = self.journal.replay(stage, z, threshold)
        replayed = line is not None
        if line is None:
            self._end_if_spent(z)
            line = self._evaluate(z, threshold, stage)
            self.journal.append(line)
            if line["exact"] and not line["cached"]:
                self._memo.add(z, means_of(line))
        return self._note(z, line, replayed)

    def evaluations(self) -> int:
        """Number of distinct masks scored by this search, including probes and those stopped early.
        Scores that other searches left in the memo on disk count too.
        """
        return len(self._scored)

    def seconds(self) -> float:
        """Time since the search began. Of earlier attempts only the evaluations count."""
        return round(self._earlier_seconds + time.monotonic() - self._began, 3)

    def score_unaccelerated(self, z: Z) -> Value:
        """Score once more without accelerations. Not counted, and not in the journal."""
        return self._value(self._run(self._scorer.unaccelerated(), z, None)[0])

    @contextmanager
    def tracking(
        self, title: str, planned: int, counts: Callable[[Z], bool] = lambda z: True
    ) -> Iterator[None]:
        """Show progress in this block: evaluations done and planned, best value, speed, time left.

        counts: which masks may count as the best, where some miss their quota.
        """
        with track(title, planned, "evaluations") as bar:
            self._bar, self._counts, self._best = bar, counts, -math.inf
            try:
                yield
            finally:
                self._bar = None

    # ------------------------------------------------------------------------------- one evaluation

    def _evaluate(self, z: Z, threshold: float | None, stage: str) -> Line:
        began, use = time.monotonic(), self._scorer.accelerations
        known = None
        if use.memo:  # from a part of the journal that no longer applies, or from another search
            strayed = self.journal.strayed.get(z)
            known = self._memo.get(z) if strayed is None else means_of(strayed)
        answers: dict[int, list[Answer]] = {}
        work = 0.0
        if known is None:
            answers, work = self._run(self._scorer, z, threshold if use.early_end else None)
        value = self._value(answers) if known is None else self._exact_value(known)
        return {
            "number": self._number + 1,
            "stage": stage,
            "z": z_to_texts(z),
            "threshold": threshold,
            **vars(value),
            "examples": sum(map(len, answers.values())),
            "losses": {str(text): self._loss(answers[text]) for text in sorted(answers)},
            "cached": known is not None,
            "seconds": round(time.monotonic() - began, 4),
            "layer_forwards": round(work, 3),
        }

    def _run(
        self, scorer: Scorer, z: Z, threshold: float | None
    ) -> tuple[dict[int, list[Answer]], float]:
        """The answers in the texts of all ranks, and the layer-forwards they took.

        With a threshold, each rank runs one text per round, the one with the highest expected loss
        first, until no answers to the rest could lift the value above the threshold.
        """
        rounds = [sorted(scorer.texts)]
        if threshold is not None:
            order = sorted(scorer.texts, key=lambda text: (-self._expected_losses[text], text))
            num_rounds = -(-scorer.num_texts // rank_and_size()[1])
            rounds = [order[number : number + 1] for number in range(num_rounds)]
        answers: dict[int, list[Answer]] = {}
        work = 0.0
        for texts in rounds:
            for share, spent in gather(scorer.score(z, texts)):
                answers |= share
                work += spent
            if threshold is not None and self._value(answers).value <= threshold:
                break
        return answers, work

    def _value(self, answers: Mapping[int, list[Answer]]) -> Value:
        """Exact if all texts are there. Otherwise an upper bound: all others answered perfectly."""
        every = [answer for text in sorted(answers) for answer in answers[text]]
        left = self.num_examples - len(every)
        value = self._exact_value(_means(every + [PERFECT] * left))
        return value if not left else Value(value.value, False, None, None, None)

    def _exact_value(self, means: Means) -> Value:
        return Value(rounded(weighted(self.name, *means)), True, *means)

    def _loss(self, answers: list[Answer]) -> float:
        """How far a text's questions are from perfect answers."""
        best, got = weighted(self.name, *_means([PERFECT])), weighted(self.name, *_means(answers))
        return round(len(answers) * (best - got), 4)

    # ------------------------------------------------------------------------------------ the state

    def _note(self, z: Z, line: Line, replayed: bool) -> Value:
        """Update the state after a call. A replayed line has the same effect as a computed one."""
        value = Value(**{name: line[name] for name in Value.__dataclass_fields__})
        self._number = line["number"]
        self.cost.add(line)
        for text, loss in line["losses"].items():
            before = self._expected_losses[int(text)]
            self._expected_losses[int(text)] = before + NEWEST_SHARE * (loss - before)
        known = self._known.get(z)
        if known is None or not known.exact:
            self._known[z] = value
        if self._bar is not None and z not in self._scored:
            if value.exact and value.value > self._best and self._counts(z):
                self._best = self._bar.figures["best"] = value.value
            (self._bar.skip if replayed else self._bar.advance)()
        self._scored.add(z)
        if replayed:
            self._earlier_seconds += line["seconds"]
        return value

    def _end_if_spent(self, z: Z) -> None:
        used, most = len(self._scored), self._max_evaluations
        if most is not None and used >= most and z not in self._scored:
            raise SearchEnded(f"--max-evaluations {most} is reached")
        if (hours := self._max_hours) is not None:
            self.out_of_time = agree(self.seconds() >= hours * 3600)  # rank 0's clock decides
            if self.out_of_time:
                raise SearchEnded(f"--max-hours {hours:g} is reached")


def means_of(line: Line) -> Means:
    return Means(*(line[name] for name in Means._fields))


def _means(answers: list[Answer]) -> Means:
    count = len(answers)
    return Means(
        sum(answer.correct for answer in answers) / count,
        math.fsum(math.exp(answer.log_probability) for answer in answers) / count,
        math.fsum(answer.log_probability for answer in answers) / count,
    )
