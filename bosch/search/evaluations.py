"""The objective of a search: it takes masks and returns their values.

    with open_objective(inputs, settings) as objective:
        value = objective(z, threshold=best.value, stage="stage 1, layer 7")

Given the outcomes of masks, a search is deterministic: after a kill it looks up what is in the file
(outcomes.py) and continues as if nothing had happened. With several ranks each runs the whole
search, and every call is collective.

A mask that cannot exceed its threshold ends early: the haystacks are read in the order of their
expected losses, until the rest could not lift the value above the threshold. What is read, and so
what a search learns, depends neither on the accelerations nor on the number of ranks."""

import math
import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from itertools import accumulate

from bosch.calibration import Calibration
from bosch.method import Inputs
from bosch.run.files import STARTED
from bosch.run.fingerprint import fingerprint
from bosch.run.group import Group, agree, joined
from bosch.run.progress import Bar
from bosch.search.objective import Means, Outcome, SearchEnded, Value, Z, rounded, weighted
from bosch.search.outcomes import Cost, Outcomes, scoring_facts
from bosch.search.scorer import Answer, Scorer
from bosch.search.settings import Accelerations, SearchSettings

NEWEST_SHARE = 0.3  # weight of the newest loss in the moving average of a haystack's losses


@contextmanager
def open_objective(inputs: Inputs, settings: SearchSettings) -> "Iterator[MaskObjective]":
    """The objective for a method's inputs, with the file of its outcomes in the stage's folder."""
    with joined():
        model, calibration, window = inputs.model, inputs.calibration, inputs.window_tokens
        facts = scoring_facts(model, inputs.model_info, calibration, window)
        if inputs.sink != "none":
            facts["sink"] = inputs.sink
        use, folder, shared = settings.accelerations, inputs.folder, None
        if use.memo and (folder / STARTED).is_file():  # a stage's: runs lie beside each other
            shared = folder.parent.parent / "shared" / f"masks-{fingerprint(facts)[:16]}"
        scorer = Scorer(model, calibration, window, use, settings.masks_at_once)
        files = Outcomes(folder, facts), Outcomes(shared, facts)
        yield MaskObjective(scorer, calibration, settings, *files)


class MaskObjective:
    """Scores masks. Collective: every rank calls it with the same masks in the same order."""

    def __init__(
        self,
        scorer: Scorer,
        calibration: Calibration,
        settings: SearchSettings,
        own: Outcomes | None = None,
        shared: Outcomes | None = None,
    ) -> None:
        self.questions = [len(haystack.questions) for haystack in calibration.haystacks]
        self.out_of_time = False
        # Of every mask that this search has scored: exact, or the newest bound.
        self.values: dict[Z, Value] = {}
        self._memo = self.values if scorer.accelerations.memo else {}
        self._scorer, self._settings, self._name = scorer, settings, settings.objective
        self._own, self._shared = own or Outcomes(None, {}), shared or Outcomes(None, {})
        self.cost: Cost = replace(self._own.cost)
        self._began = time.monotonic()
        self._expected_losses = [0.0] * len(self.questions)

    def __call__(self, z: Z, threshold: float | None = None, stage: str = "") -> Value:
        """Without a threshold the value is exact. With one, it may be a bound that does not exceed
        it, from the haystacks read so far.

        Accept a mask if `value > threshold`."""
        return self.score_masks([z], threshold, stage)[0]

    def score_masks(
        self,
        masks: Sequence[Z],
        threshold: float | None = None,
        stage: str = "",
        haystacks: Sequence[int] | None = None,
        bar: Bar | None = None,
    ) -> list[Value]:
        """Score several masks at once: with several ranks they share them.

        haystacks: read only these, for their outcomes; the value is then only a bound. bar: counts
        the masks that are new to this search."""
        # Those that masks fail first: they end an evaluation soonest.
        losses = self._expected_losses
        order = haystacks or sorted(range(len(self.questions)), key=lambda number: -losses[number])
        limit = threshold if self._scorer.accelerations.early_end else None
        allowed = asked = [z for z in masks if not self._is_known(z, threshold)]
        if (most := self._settings.max_evaluations) is not None:
            counts = accumulate((z not in self.values for z in asked), initial=len(self.values))
            allowed = [z for z, count in zip(asked, list(counts)[1:], strict=True) if count <= most]
        found = [self._look_up(z) for z in allowed]
        must_run = [self._read(outcome, order, limit) is None for outcome in found]
        if any(must_run) and (hours := self._settings.max_hours) is not None:
            self.out_of_time = agree(self.seconds() >= hours * 3600)  # rank 0's clock decides
            if self.out_of_time:
                raise SearchEnded(f"--max-hours {hours:g} is reached")
        began = time.monotonic()
        runs = self._run(self._scorer, allowed, found, order, limit)
        seconds = round((time.monotonic() - began) / max(1, sum(must_run)), 4)
        for z, before, (outcome, work) in zip(allowed, found, runs, strict=True):
            value = self._read(outcome, order, threshold)
            assert value is not None
            num_run = len(outcome) - len(before)
            if not outcome.keys() <= self._own.known.get(z, {}).keys():
                line = {
                    "stage": stage,
                    "threshold": threshold,
                    "value": value.value,
                    "exact": value.exact,
                    "run": num_run,
                    "seconds": seconds if num_run else 0.0,
                    "layer_forwards": round(work, 3),
                }
                self._own.add(z, outcome, **line)
                self.cost.add(line)
                if num_run:
                    self._shared.add(z, outcome, **line)
            if bar is not None and z not in self.values:
                (bar.advance if num_run else bar.skip)()
            # A looked-up outcome has the same effect on the search as a computed one.
            for number, means in value.haystacks.items():
                before_loss, loss = self._expected_losses[number], self._loss(number, means)
                self._expected_losses[number] += NEWEST_SHARE * (round(loss, 4) - before_loss)
            if z not in self.values or not self.values[z].exact:
                self.values[z] = value
        if len(allowed) < len(asked):
            raise SearchEnded(f"--max-evaluations {most} is reached")
        return [self.values[z] for z in masks]

    def score_unaccelerated(self, z: Z) -> Value:
        """Score once more without accelerations. Not counted, and in no file."""
        order, scorer = range(len(self.questions)), copy(self._scorer)
        scorer.accelerations = Accelerations.none()
        ((outcome, _),) = self._run(scorer, [z], [{}], order, None)
        value = self._read(outcome, order, None)
        assert value is not None
        return value

    def seconds(self) -> float:
        """Time since the search began. Of earlier attempts only the evaluations count."""
        earlier = self._own.cost.evaluation_seconds
        return round(earlier + time.monotonic() - self._began, 3)

    def _is_known(self, z: Z, threshold: float | None) -> bool:
        value = self._memo.get(z)
        return value is not None and (
            value.exact or (threshold is not None and value.value <= threshold)
        )

    def _look_up(self, z: Z) -> Outcome:
        """What is known of a mask from files, and from an evaluation that ended early."""
        value, files = self._memo.get(z), (self._shared, self._own)
        known = [*(file.known.get(z, {}) for file in files), value.haystacks if value else {}]
        return {number: means for part in known for number, means in part.items()}

    def _run(
        self,
        scorer: Scorer,
        masks: Sequence[Z],
        known: Sequence[Outcome],
        order: Sequence[int],
        threshold: float | None,
    ) -> list[tuple[Outcome, float]]:
        """For each mask, the outcome with what was known before, and the layer-forwards it took.

        With a threshold the ranks run one haystack of each of their masks per round, until no
        answers to the rest could lift a mask's value above it."""
        found = [dict(outcome) for outcome in known]
        work = [0.0] * len(masks)
        waiting = [
            scorer.share([number for number in order if number not in outcome], index, len(masks))
            for index, outcome in enumerate(known)
        ]

        def score_mine() -> list[tuple[int, dict[int, list[Answer]], float]]:
            mine = []
            for index in left:
                numbers = waiting[index][: None if threshold is None else 1]
                waiting[index] = waiting[index][len(numbers) :]
                mine.append((index, *scorer.score(masks[index], numbers)))
            return mine

        ranks = Group.current()
        while left := [n for n, o in enumerate(found) if self._read(o, order, threshold) is None]:
            for share in ranks.gather(ranks.all_succeed(score_mine)):
                for index, answers, spent in share:
                    found[index] |= {number: _means(answers[number]) for number in answers}
                    work[index] += spent
        return list(zip(found, work, strict=True))

    def _read(
        self, outcome: Outcome, order: Sequence[int], threshold: float | None
    ) -> Value | None:
        """The value of a mask, from its haystacks in this order: a bound as soon as the rest could
        not lift it above the threshold, exact when all are read. None if more must run first."""
        read: dict[int, Means] = {}
        num_questions = sum(self.questions)
        perfect = weighted(self._name, 1.0, 1.0, 0.0)
        lost, bound = 0.0, perfect
        for number in order:
            if number not in outcome:
                return None
            read[number] = outcome[number]
            lost += self._loss(number, outcome[number])
            bound = rounded(perfect - lost / num_questions)
            if threshold is not None and bound <= threshold:
                break
        if len(read) < len(self.questions):
            return Value(bound, False, None, None, None, read)
        columns = zip(*(read[number] for number in range(len(self.questions))), strict=True)
        sums = (math.fsum(map(operator.mul, self.questions, column)) for column in columns)
        means = Means(*(each / num_questions for each in sums))
        return Value(rounded(weighted(self._name, *means)), True, *means, read)

    def _loss(self, number: int, means: Means) -> float:
        """How far a haystack's questions are from perfect answers."""
        perfect = weighted(self._name, 1.0, 1.0, 0.0)
        return self.questions[number] * (perfect - weighted(self._name, *means))


def _means(answers: list[Answer]) -> Means:
    count = len(answers)
    return Means(
        sum(answer.correct for answer in answers) / count,
        math.fsum(math.exp(answer.log_probability) for answer in answers) / count,
        math.fsum(answer.log_probability for answer in answers) / count,
    )
