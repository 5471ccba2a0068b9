"""The objective of a search: it takes a mask, returns its value, and writes each evaluation to the
journal before the search continues.

    with open_objective(inputs, "accuracy", {"kappa": 100}) as objective:
        with objective.tracking("stage 1", planned=224):
            value = objective(z, threshold=best.value, stage="stage 1, layer 7")

Given the values, a search is deterministic: after a kill it replays its journal and continues as if
nothing had happened. With several ranks each runs the whole search, and every call is collective.

A mask that cannot exceed its threshold ends early: the texts are read in the order of their
expected losses, until the rest could not lift the value above the threshold. What is read, and so
what a search learns, depends neither on the accelerations nor on the number of ranks.
"""

import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bosch.calibration import Calibration
from bosch.method import Inputs
from bosch.run.group import Group, agree, joined
from bosch.run.progress import Bar, track
from bosch.search.journal import Journal, Line, texts_of, z_to_texts
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
Texts = dict[int, Means]


@dataclass
class Cost:
    """The cost of a search, over all attempts and ranks."""

    computed: int = 0  # evaluations that ran the model
    texts: int = 0  # texts they ran it on
    layer_forwards: float = 0.0  # layers x texts; a part of a layer counts its share (layers.py)
    evaluation_seconds: float = 0.0  # wall time

    def add(self, line: Line) -> None:
        self.computed += not line["cached"]
        self.texts += line["run"]
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
    masks_at_once: int = 1,
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
            Scorer(model, calibration, inputs.window_tokens, accelerations, masks_at_once),
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
        self.name = name
        self.questions = [len(haystack.questions) for haystack in calibration.haystacks]
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
        """Without a threshold the value is exact. With one, it may be a bound that does not exceed
        it, from the texts read so far.

        Accept a mask if `value > threshold`.
        """
        return self.score_masks([z], threshold, stage)[0]

    def score_masks(
        self,
        masks: Sequence[Z],
        threshold: float | None = None,
        stage: str = "",
        texts: Sequence[int] | None = None,
    ) -> list[Value]:
        """Score several masks at once: with several ranks they share them.

        texts: read only these, for their outcomes; the value is then only a bound.
        """
        new = [z for z in masks if not self._is_known(z, threshold)]
        order = self._order() if texts is None else texts
        replayed = 0
        for z in new:
            line = self.journal.replay(stage, z, threshold)
            if line is None:
                break
            self._note(z, line, replayed=True)
            replayed += 1
        missing = new[replayed:]
        allowed = self._allowed(missing)
        lines = self._evaluate(allowed, order, threshold, stage)
        for z, (line, found) in zip(allowed, lines, strict=True):
            self.journal.append(line)
            if len(found) == len(self.questions) and not line["cached"]:
                self._memo.add(z, found)
            self._note(z, line, replayed=False)
        if len(allowed) < len(missing):
            raise SearchEnded(f"--max-evaluations {self._max_evaluations} is reached")
        return [self._known[z] for z in masks]

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
        order = self._order()
        ((texts, _),) = self._run(self._scorer.unaccelerated(), [z], order, None)
        value = self._read(texts, order, None)
        assert value is not None
        return value

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
                # `counts` holds the search and its model: no cycle may keep them until a collection
                self._bar, self._counts = None, lambda z: True

    # ------------------------------------------------------------------------------- one evaluation

    def _evaluate(
        self, masks: Sequence[Z], order: Sequence[int], threshold: float | None, stage: str
    ) -> list[tuple[Line, Texts]]:
        """The line of each mask, and all of its texts that are known."""
        began, use = time.monotonic(), self._scorer.accelerations
        found: dict[Z, Texts] = {}
        if use.memo:  # from a part of the journal that no longer applies, or from another search
            known = ((z, self.journal.strayed.get(z) or self._memo.get(z)) for z in masks)
            found = {z: texts for z, texts in known if texts is not None}
        new = [z for z in masks if z not in found]
        runs = self._run(self._scorer, new, order, threshold if use.early_end else None)
        work = {z: spent for z, (_, spent) in zip(new, runs, strict=True)}
        found |= {z: texts for z, (texts, _) in zip(new, runs, strict=True)}
        seconds = (time.monotonic() - began) / max(1, len(masks))
        lines = []
        for number, z in enumerate(masks, self._number + 1):
            value = self._read(found[z], order, threshold)
            assert value is not None
            line = {
                "number": number,
                "stage": stage,
                "z": z_to_texts(z),
                "threshold": threshold,
                **vars(value),
                "texts": {str(text): list(means) for text, means in value.texts.items()},
                "cached": z not in work,
                "run": len(found[z]) if z in work else 0,
                "seconds": round(seconds, 4),
                "layer_forwards": round(work.get(z, 0.0), 3),
            }
            lines.append((line, found[z]))
        return lines

    def _run(
        self, scorer: Scorer, masks: Sequence[Z], order: Sequence[int], threshold: float | None
    ) -> list[tuple[Texts, float]]:
        """For each mask, the means of its texts, and the layer-forwards they took.

        With a threshold the ranks run one text of each of their masks per round, until no answers
        to the rest could lift a mask's value above it.
        """
        found: list[Texts] = [{} for _ in masks]
        work = [0.0] * len(masks)
        waiting = [scorer.share(order, index, len(masks)) for index in range(len(masks))]
        left = list(range(len(masks)))

        def score_mine() -> list[tuple[int, dict[int, list[Answer]], float]]:
            mine = []
            for index in left:
                texts = waiting[index][: None if threshold is None else 1]
                waiting[index] = waiting[index][len(texts) :]
                mine.append((index, *scorer.score(masks[index], texts)))
            return mine

        ranks = Group.current()
        while left:
            for share in ranks.gather(ranks.all_succeed(score_mine)):
                for index, answers, spent in share:
                    found[index] |= {text: _means(answers[text]) for text in answers}
                    work[index] += spent
            left = [index for index in left if self._read(found[index], order, threshold) is None]
        return list(zip(found, work, strict=True))

    def _read(self, texts: Texts, order: Sequence[int], threshold: float | None) -> Value | None:
        """The value of a mask, from its texts in this order: a bound as soon as the rest could not
        lift it above the threshold, exact when all are read. None if more texts must run first.
        """
        read: Texts = {}
        lost, bound = 0.0, self._perfect  # to perfect answers
        for text in order:
            if text not in texts:
                return None
            read[text] = texts[text]
            lost += self._loss(text, texts[text])
            bound = rounded(self._perfect - lost / sum(self.questions))
            if threshold is not None and bound <= threshold and len(read) < len(self.questions):
                break
        if len(read) < len(self.questions):
            return Value(bound, False, None, None, None, read)
        means = self._means_of(read)
        return Value(rounded(weighted(self.name, *means)), True, *means, read)

    def _means_of(self, texts: Texts) -> Means:
        """Over all questions."""
        columns = zip(*(texts[text] for text in range(len(self.questions))), strict=True)
        total = sum(self.questions)
        return Means(
            *(math.fsum(map(operator.mul, self.questions, column)) / total for column in columns)
        )

    @property
    def _perfect(self) -> float:
        return weighted(self.name, 1.0, 1.0, 0.0)

    def _loss(self, text: int, means: Means) -> float:
        """How far a text's questions are from perfect answers."""
        return self.questions[text] * (self._perfect - weighted(self.name, *means))

    def _order(self) -> list[int]:
        """The texts, those that masks fail first: they end an evaluation soonest."""
        return sorted(range(len(self.questions)), key=lambda text: -self._expected_losses[text])

    # ------------------------------------------------------------------------------------ the state

    def _note(self, z: Z, line: Line, replayed: bool) -> None:
        """Update the state. A replayed line has the same effect as a computed one."""
        texts = texts_of(line)
        facts = {name: line[name] for name in ("value", "exact", *Means._fields)}
        value = Value(**facts, texts=texts)
        self._number = line["number"]
        self.cost.add(line)
        for text, means in texts.items():
            before = self._expected_losses[text]
            loss = round(self._loss(text, means), 4)
            self._expected_losses[text] = before + NEWEST_SHARE * (loss - before)
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

    def _is_known(self, z: Z, threshold: float | None) -> bool:
        known = self._known.get(z) if self._scorer.accelerations.memo else None
        return known is not None and (
            known.exact or (threshold is not None and known.value <= threshold)
        )

    def _allowed(self, masks: Sequence[Z]) -> Sequence[Z]:
        """Those that the limits allow to evaluate, from the first on."""
        if masks and (hours := self._max_hours) is not None:
            self.out_of_time = agree(self.seconds() >= hours * 3600)  # rank 0's clock decides
            if self.out_of_time:
                raise SearchEnded(f"--max-hours {hours:g} is reached")
        if self._max_evaluations is None:
            return masks
        left, allowed = self._max_evaluations - self.evaluations(), []
        for z in masks:
            left -= z not in self._scored
            if left < 0:
                break
            allowed.append(z)
        return allowed


def _means(answers: list[Answer]) -> Means:
    """Over the questions of a text."""
    count = len(answers)
    return Means(
        sum(answer.correct for answer in answers) / count,
        math.fsum(math.exp(answer.log_probability) for answer in answers) / count,
        math.fsum(answer.log_probability for answer in answers) / count,
    )
