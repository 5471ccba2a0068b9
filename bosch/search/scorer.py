"""Scores masks: how a dense model under a mask answers each calibration question.

Texts run one at a time, layer by layer, and only as far as the mask needs (`Accelerations`).
Batches of texts are not faster, even on a CPU with texts of 500 tokens (measured: 4 to 22 %
slower). With several ranks each scores its share of the texts, or, where several masks are scored
at once, of the masks.
"""
# B batch (1), T tokens, N rows that predict answer tokens, C hidden size, V vocabulary

import math
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bosch.calibration import Calibration, Haystack
from bosch.run.errors import UserError
from bosch.run.group import rank_and_size
from bosch.search.layers import OVERFLOW, Layers
from bosch.search.objective import Z
from bosch.search.settings import Accelerations
from bosch.search.state_cache import PrefixNumbers, StateCache

GIB = 1 << 30
CPU_MEMORY_GB = 1.0  # default for cached states


class Answer(NamedTuple):
    """A model's answer to one question."""

    correct: bool  # every token of the answer is the arg-max
    log_probability: float  # of the answer: the sum over its tokens


class Scorer:
    """A model and a calibration set, prepared for scoring many masks."""

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: Calibration,
        window_tokens: int,
        accelerations: Accelerations | None = None,
        masks_at_once: int = 1,
    ) -> None:
        self.accelerations = accelerations or Accelerations()
        self.layers = Layers(model, window_tokens)
        self.num_texts = len(calibration.haystacks)
        self.prefixes = PrefixNumbers()
        rank, ranks = rank_and_size()
        # Each team of ranks scores masks of its own; its ranks divide the texts among them.
        self.num_teams = math.gcd(ranks, masks_at_once)
        self.team_size = size = ranks // self.num_teams
        self.team = rank // size
        cache_bytes = self._cache_bytes(model.device) // max(1, -(-self.num_texts // size))
        self.texts = {
            number: Text(haystack, model.device, StateCache(cache_bytes))
            for number, haystack in enumerate(calibration.haystacks)
            if number % size == rank % size
        }
        first = calibration.haystacks[0].ids_T[:64]
        self.layers.check(first.to(model.device))

    def score(self, z: Z, texts: Sequence[int]) -> tuple[dict[int, list[Answer]], float]:
        """The answers in some of this rank's texts, and the layer-forwards they took."""
        before = self.layers.work
        numbers, branch = self.prefixes.visit(z)
        answers = {text: self._answers(self.texts[text], z, numbers, branch) for text in texts}
        return answers, self.layers.work - before

    def share(self, texts: Sequence[int], index: int, num_masks: int) -> list[int]:
        """Those of the texts that this rank scores for one of several masks. A single mask is
        divided among the teams."""
        teams, size = self.num_teams, self.team_size
        turn = [index if num_masks > 1 else text // size for text in texts]
        return [
            text
            for text, number in zip(texts, turn, strict=True)
            if text in self.texts and number % teams == self.team
        ]

    def unaccelerated(self) -> "Scorer":
        """The same scorer without accelerations."""
        plain = copy(self)
        plain.accelerations = Accelerations.none()
        return plain

    @torch.inference_mode()
    def _answers(self, text: "Text", z: Z, numbers: list[int], branch: int) -> list[Answer]:
        log_NV = self.layers.log_probabilities(self._run(text, z, numbers, branch))
        best_N = log_NV.argmax(-1)
        target_N = log_NV.gather(1, text.targets_N[:, None])[:, 0].double()
        right, log_probabilities = (best_N == text.targets_N).tolist(), target_N.tolist()
        answers = []
        for part in text.parts:
            log_probability = math.fsum(log_probabilities[part])
            if math.isnan(log_probability):
                raise UserError(OVERFLOW)
            answers.append(Answer(all(right[part]), log_probability))
        return answers

    def _run(self, text: "Text", z: Z, numbers: list[int], branch: int) -> Tensor:
        """(1, N, C): the top layer's hidden states, in the rows that predict answers."""
        use, cache, top = self.accelerations, text.cache, len(z) - 1
        hidden_BTC, rotary = self.layers.embed(text.ids_T)
        # With room for several masks cache all layers, otherwise only those where masks differ.
        roomy = cache.capacity_bytes >= 4 * len(z) * hidden_BTC.nbytes
        start = 0
        for layer in range(branch, 0, -1) if use.prefixes else ():
            if (cached_BTC := cache.get(numbers[layer])) is not None:
                start, hidden_BTC = layer, cached_BTC
                break
        for layer in range(start, len(z)):
            if use.prefixes and layer > start and (roomy or layer == branch):
                cache.put(numbers[layer], hidden_BTC)
            rows_N = text.rows_N if use.answer_rows and layer == top else None
            hidden_BTC = self.layers.run(layer, hidden_BTC, rotary, z[layer], rows_N)
        return hidden_BTC if use.answer_rows else hidden_BTC[:, text.rows_N]

    def _cache_bytes(self, device: torch.device) -> int:
        """For the cached states of all texts."""
        given = self.accelerations.memory_gb
        if given is None and device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0] // 2
        return int((CPU_MEMORY_GB if given is None else given) * GIB)


class Text:
    """A calibration text on the model's device."""

    def __init__(self, haystack: Haystack, device: torch.device, cache: StateCache) -> None:
        # The last token of the last answer predicts nothing of interest.
        last = max(question.answer.stop for question in haystack.questions) - 1
        self.ids_T = haystack.ids_T[:last].to(device)
        rows = [row for question in haystack.questions for row in question.predicting]
        self.rows_N = torch.tensor(rows, device=device)
        self.targets_N = haystack.ids_T.to(device)[self.rows_N + 1]
        self.cache = cache
        self.parts: list[slice] = []  # the rows of each question
        for question in haystack.questions:
            begin = self.parts[-1].stop if self.parts else 0
            self.parts.append(slice(begin, begin + len(question.answer)))
