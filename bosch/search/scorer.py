"""Scores masks: what each calibration question's answer gets from a dense model under a mask.

One text is run at a time, layer by layer, and as little of it as the mask needs (`Accelerations`);
a batch of texts is not faster even on a CPU with texts of 500 tokens (measured: 4 to 22 % slower).
With several ranks each scores its share of the texts.
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
from bosch.search.kept import Prefixes, Shelf
from bosch.search.layers import OVERFLOW, Layers
from bosch.search.objective import Rows
from bosch.search.settings import Accelerations

GIB = 1 << 30
CPU_MEMORY_GB = 1.0  # unless said otherwise


class Answer(NamedTuple):
    """What a model makes of one question."""

    correct: bool  # every token of the answer is the arg-max
    log_probability: float  # of the whole answer: the sum over its tokens


class Scorer:
    """A model and a calibration set, ready for many masks."""

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: Calibration,
        window_tokens: int,
        accelerations: Accelerations | None = None,
    ) -> None:
        self.accelerations = accelerations or Accelerations()
        self.layers = Layers(model, window_tokens)
        self.num_texts = len(calibration.haystacks)
        self.prefixes = Prefixes()
        rank, size = rank_and_size()
        budgets = [b // max(1, -(-self.num_texts // size)) for b in self._budgets(model.device)]
        self.mine = {
            number: Text(haystack, model.device, Shelf(*budgets))
            for number, haystack in enumerate(calibration.haystacks)
            if number % size == rank
        }
        first = calibration.haystacks[0].ids_T[:64]
        self.layers.check(first.to(model.device))

    def score(self, z: Rows, texts: Sequence[int]) -> tuple[dict[int, list[Answer]], float]:
        """The answers in some texts, and the layer-forwards they took: this rank's part of both."""
        before = self.layers.work
        numbers, branch = self.prefixes.visit(z)
        answers = {text: self._answers(self.mine[text], z, numbers, branch) for text in texts}
        return answers, self.layers.work - before

    def plainly(self) -> "Scorer":
        """The same, with every acceleration off."""
        plain = copy(self)
        plain.accelerations = Accelerations.none()
        return plain

    @torch.inference_mode()
    def _answers(self, text: "Text", z: Rows, numbers: list[int], branch: int) -> list[Answer]:
        log_NV = self.layers.log_probabilities(self._run(text, z, numbers, branch))
        best_N = log_NV.argmax(-1)
        own_N = log_NV.gather(1, text.targets_N[:, None])[:, 0].double()
        right, own = (best_N == text.targets_N).tolist(), own_N.tolist()
        answers = []
        for part in text.parts:
            log_probability = math.fsum(own[part])
            if math.isnan(log_probability):
                raise UserError(OVERFLOW)
            answers.append(Answer(all(right[part]), log_probability))
        return answers

    def _run(self, text: "Text", z: Rows, numbers: list[int], branch: int) -> Tensor:
        """(1, N, C): the hidden states behind the top layer, in the rows that predict answers."""
        use, shelf, top = self.accelerations, text.shelf, len(z) - 1
        hidden_BTC, rotary = self.layers.embed(text.ids_T)
        # With room for several masks every layer's states are kept, else those where masks part.
        roomy = shelf.capacity_bytes >= 4 * len(z) * hidden_BTC.nbytes
        start = 0
        for layer in range(branch, 0, -1) if use.prefixes else ():
            if (kept_BTC := shelf.get(numbers[layer])) is not None:
                start, hidden_BTC = layer, kept_BTC
                break
        for layer in range(start, len(z)):
            if use.prefixes and layer > start and (roomy or layer == branch):
                shelf.put(numbers[layer], hidden_BTC)
            rows_N = text.rows_N if use.answer_rows and layer == top else None
            hidden_BTC = self.layers.run(layer, hidden_BTC, rotary, z[layer], rows_N)
        return hidden_BTC if use.answer_rows else hidden_BTC[:, text.rows_N]

    def _budgets(self, device: torch.device) -> tuple[int, int]:
        """Bytes on the model's device, and of pinned memory beside it."""
        given, host = self.accelerations.memory_gb, int(self.accelerations.host_memory_gb * GIB)
        if device.type != "cuda":
            return int((CPU_MEMORY_GB if given is None else given) * GIB), 0
        own = torch.cuda.mem_get_info(device)[0] // 2 if given is None else int(given * GIB)
        return own, host


class Text:
    """A text of the calibration set on the model's device."""

    def __init__(self, haystack: Haystack, device: torch.device, shelf: Shelf) -> None:
        # The last token of the last answer predicts nothing that is asked.
        last = max(question.answer.stop for question in haystack.questions) - 1
        self.ids_T = haystack.ids_T[:last].to(device)
        rows = [row for question in haystack.questions for row in question.predicting]
        self.rows_N = torch.tensor(rows, device=device)
        self.targets_N = haystack.ids_T.to(device)[self.rows_N + 1]
        self.shelf = shelf
        self.parts: list[slice] = []  # each question's rows among all
        for question in haystack.questions:
            begin = self.parts[-1].stop if self.parts else 0
            self.parts.append(slice(begin, begin + len(question.answer)))
