"""Scores masks: how a dense model under a mask answers the questions of the calibration set.

    evaluator = make_evaluator(inputs, settings)
    (value,) = evaluator.score([z], threshold=best.value, part="stage 1, layer 7")

Everything between a mask and its value is here, in this order: `score` looks a mask up in the memo
and in the files of outcomes, and writes what is new; `_run` shares the haystacks that are left
among the ranks; `answers` runs the model on one of them, layer by layer; `_read` makes a value of
an outcome, or a bound as soon as the mask cannot exceed its threshold any more.

Given the outcomes of masks, a search is deterministic: after a kill it looks up what is in the file
(outcomes.py) and continues as if nothing had happened. With several ranks each runs the whole
search, and every call of `score` is collective. What is read, and so what a search learns, depends
neither on the accelerations nor on the number of ranks."""
# B batch (1), T tokens, N rows that predict answer tokens, C hidden size, V vocabulary

import math
import operator
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bosch.calibration import Calibration, Haystack, Question
from bosch.masks.mask import Z
from bosch.method import Inputs
from bosch.run.dist import Ranks, start_ranks
from bosch.run.errors import UserError
from bosch.run.files import STARTED
from bosch.run.fingerprint import fingerprint
from bosch.run.progress import Bar
from bosch.run.stage import SHARED
from bosch.search.layers import OVERFLOW, Layers
from bosch.search.objective import Means, Outcome, SearchEnded, Value, rounded, weighted
from bosch.search.outcomes import Cost, Outcomes, scoring_facts
from bosch.search.settings import NO_ACCELERATIONS, Accelerations, SearchSettings
from bosch.search.states import Branches, LoadedHaystack, cache_bytes

NEWEST_SHARE = 0.3  # weight of the newest loss in the moving average of a haystack's losses


class Answer(NamedTuple):
    correct: bool  # every token of the answer is the arg-max
    log_probability: float  # of the answer: the sum over its tokens


def make_evaluator(inputs: Inputs, settings: SearchSettings) -> "Evaluator":
    """The evaluator for a method's inputs, with the file of its outcomes in the stage's folder."""
    start_ranks()
    model, window_tokens = inputs.model, inputs.window_tokens
    calibration = inputs.calibration_of_search
    facts = scoring_facts(model, inputs.model_info, calibration, window_tokens)
    if inputs.sink.kind != "none":
        facts["sink"] = str(inputs.sink)
    folder, shared = inputs.folder, None
    # A stage's folder: runs lie beside each other, and share what they know of masks.
    if settings.accelerations.memo and (folder / STARTED).is_file():
        shared = folder.parent.parent / SHARED / f"masks-{fingerprint(facts)[:16]}"
    return Evaluator(
        model, calibration, window_tokens, settings, folder=folder, shared=shared, facts=facts
    )


class Evaluator:
    """Scores masks. Collective: every rank calls `score` with the same masks in the same order."""

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: Calibration,
        window_tokens: int,
        settings: SearchSettings | None = None,
        folder: Path | None = None,
        shared: Path | None = None,
        facts: object = None,
    ) -> None:
        """folder, shared: of the file of this search, and of that of all searches with the same
        facts, on which outcomes depend. None: nothing is looked up or written."""
        self.settings = settings = settings or SearchSettings()
        self.use = settings.accelerations
        # As how many questions each counts.
        self.questions = [haystack.weight for haystack in calibration.haystacks]
        # Of every mask that this search has scored: exact, or the newest bound.
        self.values: dict[Z, Value] = {}
        self.out_of_time = False
        self._expected_losses = [0.0] * len(self.questions)
        self.layers = Layers(model, window_tokens)

        # Each team of ranks scores masks of its own; its ranks divide the haystacks among them. As
        # many teams as masks are proposed at once, if the ranks can be split so: else as many as
        # divide both, so that neither a rank nor a mask is left over.
        ranks = Ranks.current()
        rank, num_ranks = ranks.rank, ranks.world
        self._num_teams = math.gcd(num_ranks, settings.masks_at_once)
        self._team_size = num_ranks // self._num_teams
        self._team = rank // self._team_size
        num_mine = max(1, -(-len(self.questions) // self._team_size))
        capacity_bytes = cache_bytes(model.device, self.use.memory_gb) // num_mine
        self.haystacks = {  # of this rank, by number
            number: LoadedHaystack(haystack, model.device, capacity_bytes)
            for number, haystack in enumerate(calibration.haystacks)
            if number % self._team_size == rank % self._team_size
        }
        self._branches = Branches()
        # The model is compared with its layers on the beginning of a text, in all of its rows.
        # Without prefixes: what is cached, and where masks branch, is for the search's own texts.
        some_ids_T = calibration.haystacks[0].ids_T[:64]
        every_row = Question(answer=range(1, len(some_ids_T)), needle=range(0), task="")
        probe = LoadedHaystack(Haystack(some_ids_T, (every_row,)), model.device, 0)
        uncached = Accelerations(prefixes=False)
        self.work = 0.0  # layer-forwards of this rank
        self.layers.check(probe.ids_T, lambda z: self.hidden_states(probe, z, uncached))
        self.work = 0.0

        self._own, self._shared = Outcomes(folder, facts), Outcomes(shared, facts)
        self.cost: Cost = replace(self._own.cost)
        self._began = time.monotonic()

    # ------------------------------------------------------------------ memo, limits, files

    def score(
        self,
        masks: Sequence[Z],
        threshold: float | None = None,
        part: str = "",
        haystacks: Sequence[int] | None = None,
        bar: Bar | None = None,
    ) -> list[Value]:
        """Score several masks at once: with several ranks they share them.

        Without a threshold values are exact. With one, a value may be a bound that does not exceed
        it, from the haystacks read so far; accept a mask if `value > threshold`.

        haystacks: read only these, for their outcomes; the value is then only a bound. bar: counts
        the masks that are new to this search."""
        # Those that masks fail most first: they end an evaluation soonest. `sorted` is stable, so
        # ranks that see the same losses read in the same order.
        losses = self._expected_losses
        order = haystacks or sorted(range(len(self.questions)), key=lambda number: -losses[number])
        limit = threshold if self.use.early_end else None

        # The memo: what is exact, or known not to exceed the threshold, needs nothing more.
        known_before = {z for z in masks if self._is_known(z, threshold)}
        asked = [z for z in masks if not (self.use.memo and z in known_before)]
        # --max-evaluations counts masks, so those that are still allowed are scored before it ends
        # the search, however many are proposed at once.
        allowed, most = asked, self.settings.max_evaluations
        if most is not None:
            counts = accumulate((z not in self.values for z in asked), initial=len(self.values))
            allowed = [z for z, count in zip(asked, list(counts)[1:], strict=True) if count <= most]

        # The files, and what an evaluation that ended early has left.
        known = [self._look_up(z) for z in allowed]
        num_to_run = sum(self._read(outcome, order, limit) is None for outcome in known)
        if num_to_run and (hours := self.settings.max_hours) is not None:
            # Rank 0's clock decides: ranks that disagree would wait for each other forever. Looking
            # up takes no time, so a search that is resumed after its end still ends with its mask.
            self.out_of_time = Ranks.current().agree(self.seconds() >= hours * 3600)
            if self.out_of_time:
                raise SearchEnded(f"--max-hours {hours:g} is reached")

        began = time.monotonic()
        runs = self._run(allowed, known, order, limit, self.use)
        seconds = round((time.monotonic() - began) / max(1, num_to_run), 4)

        for z, before, (outcome, work) in zip(allowed, known, runs, strict=True):
            # With the threshold even where nothing ends early: a value must not depend on that.
            value = self._read(outcome, order, threshold)
            assert value is not None
            num_run = len(outcome) - len(before)
            if not outcome.keys() <= self._own.known.get(z, {}).keys():
                line = {
                    "stage": part,
                    "threshold": threshold,
                    "value": value.value,
                    "exact": value.exact,
                    "run": num_run,
                    "seconds": seconds if num_run else 0.0,
                    "layer_forwards": round(work, 3),
                }
                self._own.add(z, outcome, line)
                self.cost.add(line)
                if num_run:
                    self._shared.add(z, outcome, line)
            if bar is not None and z not in self.values:
                if num_run:
                    bar.advance()
                else:
                    bar.skip()
            if z in known_before:  # read again, without the memo: it must not change the search
                continue
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
        order = range(len(self.questions))
        ((outcome, _),) = self._run([z], [{}], order, None, NO_ACCELERATIONS)
        value = self._read(outcome, order, None)
        assert value is not None
        return value

    def seconds(self) -> float:
        """Time since the search began. Of earlier attempts only the evaluations count."""
        earlier = self._own.cost.evaluation_seconds
        return round(earlier + time.monotonic() - self._began, 3)

    def _is_known(self, z: Z, threshold: float | None) -> bool:
        value = self.values.get(z)
        return value is not None and (
            value.exact or (threshold is not None and value.value <= threshold)
        )

    def _look_up(self, z: Z) -> Outcome:
        """What is known of a mask from files, and from an evaluation that ended early."""
        known = {**self._shared.known.get(z, {}), **self._own.known.get(z, {})}
        if self.use.memo and z in self.values:
            known |= self.values[z].haystacks
        return known

    # ------------------------------------------------------------------ sharing over ranks

    def _run(
        self,
        masks: Sequence[Z],
        known: Sequence[Outcome],
        order: Sequence[int],
        threshold: float | None,
        use: Accelerations,
    ) -> list[tuple[Outcome, float]]:
        """For each mask, the outcome with what was known before, and the layer-forwards it took.

        With a threshold the ranks run one haystack of each of their masks per round, until no
        answers to the rest could lift a mask's value above it."""
        found = [dict(outcome) for outcome in known]
        work = [0.0] * len(masks)
        # This rank's haystacks of each mask. Four ranks as two teams of two, and haystacks 0 to 3:
        #
        #                        several masks             a single mask
        #     rank 0 (team 0)    0, 2 of masks 0, 2, ..    0        else one team would have
        #     rank 1 (team 0)    1, 3 of masks 0, 2, ..    1        nothing to do
        #     rank 2 (team 1)    0, 2 of masks 1, 3, ..    2
        #     rank 3 (team 1)    1, 3 of masks 1, 3, ..    3
        waiting = [
            [
                number
                for number in order
                if number not in outcome
                and number in self.haystacks
                and (index if len(masks) > 1 else number // self._team_size) % self._num_teams
                == self._team
            ]
            for index, outcome in enumerate(known)
        ]
        ranks = Ranks.current()
        # Every rank has the same `found` after each round, so all of them leave the loop together.
        while left := [n for n, o in enumerate(found) if self._read(o, order, threshold) is None]:
            mine: list[tuple[int, dict[int, Means], float]] = []
            with ranks.succeeding():
                for index in left:
                    # One by one, as each may be the last that a mask needs; or all at once, where
                    # nothing can end it and every round costs a message.
                    count = len(waiting[index]) if threshold is None else 1
                    now, waiting[index] = waiting[index][:count], waiting[index][count:]
                    work_before, outcome = self.work, dict[int, Means]()
                    for number in now:
                        outcome[number] = _means(self.answers(masks[index], number, use))
                    mine.append((index, outcome, self.work - work_before))
            for share in ranks.gather(mine):
                for index, outcome, spent in share:
                    found[index] |= outcome
                    work[index] += spent
        return list(zip(found, work, strict=True))

    # ------------------------------------------------------------------ the model

    @torch.inference_mode()
    def answers(self, z: Z, number: int, use: Accelerations | None = None) -> list[Answer]:
        """The model's answers to the questions of one of this rank's haystacks, under a mask. Not
        collective."""
        haystack = self.haystacks[number]
        hidden_BNC = self.hidden_states(haystack, z, use or self.use)
        log_NV = self.layers.log_probabilities(hidden_BNC)
        logs = log_NV.gather(1, haystack.targets_N[:, None])[:, 0].double().tolist()
        right = (log_NV.argmax(-1) == haystack.targets_N).tolist()
        # The rows of all questions lie one after another; `bounds` cuts them apart.
        answers = [Answer(all(right[i:j]), math.fsum(logs[i:j])) for i, j in haystack.bounds]
        if any(math.isnan(answer.log_probability) for answer in answers):
            raise UserError(OVERFLOW)
        return answers

    def hidden_states(self, haystack: LoadedHaystack, z: Z, use: Accelerations) -> Tensor:
        """(1, N, C): the top layer's hidden states, in the rows that predict answers.

        Haystacks run one at a time, layer by layer. Batches of them are not faster, even on a CPU
        with haystacks of 500 tokens (measured: 4 to 22 % slower)."""
        layers, start = self.layers, 0
        hidden_BTC, given = layers.embed(haystack.ids_T)
        kept = set[int]()  # layers whose entering states are cached
        if use.prefixes:
            branch = self._branches.branch(z)
            for layer in range(1, branch + 1):  # uses all, so that others go
                if (cached_BTC := haystack.cached(z[:layer])) is not None:
                    start, hidden_BTC = layer, cached_BTC
            kept = set(range(start + 1, len(z)))
            # With room for several masks all layers are cached. Otherwise only those where masks
            # differ, and every third of the dense model's, or as many as fit: a probe windows one
            # layer alone.
            room = haystack.capacity_bytes // hidden_BTC.nbytes
            if room < 4 * len(z):
                spacing = max(3, -(-len(z) // max(1, room)))
                dense = [n for n in kept if n % spacing == 0 and all(map(all, z[:n]))]
                kept &= {branch, *dense}
        for layer in range(start, len(z)):
            if layer in kept:
                haystack.cache(z[:layer], hidden_BTC)
            for number in layers.steps[layer]:
                is_last = number == len(layers.blocks) - 1
                if is_last and use.answer_rows and layers.takes_rows:
                    rows_N, row = haystack.rows_N, z[layer]
                    self.work += layers.share(number, hidden_BTC.shape[1], row, rows_N.tolist())
                    return layers.answer_rows(number, hidden_BTC, given[number], row, rows_N)
                self.work += 1
                hidden_BTC = layers.blocks[number](  # as the model itself calls it
                    hidden_BTC,
                    **given[number],
                    use_cache=False,
                    bosch_mask=z,
                    bosch_window=layers.window_tokens,
                )
                if isinstance(hidden_BTC, tuple):  # of older versions of transformers
                    hidden_BTC = hidden_BTC[0]
        return hidden_BTC[:, haystack.rows_N]

    # ------------------------------------------------------------------ values and bounds

    def _read(
        self, outcome: Outcome, order: Sequence[int], threshold: float | None
    ) -> Value | None:
        """The value of a mask, from its haystacks in this order: a bound as soon as the rest could
        not lift it above the threshold, exact when all are read. None if more must run first."""
        read: dict[int, Means] = {}
        num_questions = sum(self.questions)
        perfect = weighted(self.settings.objective, 1.0, 1.0, 0.0)
        lost, bound = 0.0, perfect
        for number in order:
            if number not in outcome:
                return None
            read[number] = outcome[number]
            lost += self._loss(number, outcome[number])
            # As if the rest were answered perfectly.
            bound = rounded(perfect - lost / num_questions)
            if threshold is not None and bound <= threshold:
                break
        if len(read) < len(self.questions):
            return Value(bound, False, None, None, None, read)
        # In the order of the calibration set and by exact sums, whatever the order of reading: the
        # last digit must not depend on it.
        columns = zip(*(read[number] for number in range(len(self.questions))), strict=True)
        sums = (math.fsum(map(operator.mul, self.questions, column)) for column in columns)
        means = Means(*(each / num_questions for each in sums))
        return Value(rounded(weighted(self.settings.objective, *means)), True, *means, read)

    def _loss(self, number: int, means: Means) -> float:
        """How far a haystack's questions are from perfect answers."""
        perfect = weighted(self.settings.objective, 1.0, 1.0, 0.0)
        return self.questions[number] * (perfect - weighted(self.settings.objective, *means))


def _means(answers: list[Answer]) -> Means:
    count = len(answers)
    return Means(
        sum(answer.correct for answer in answers) / count,
        math.fsum(math.exp(answer.log_probability) for answer in answers) / count,
        math.fsum(answer.log_probability for answer in answers) / count,
    )
