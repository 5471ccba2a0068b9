"""Scores masks: how a dense model under a mask answers the questions of each haystack.

Haystacks run one at a time, layer by layer, and only as far as the mask needs (`Accelerations`).
Batches of them are not faster, even on a CPU with haystacks of 500 tokens (measured: 4 to 22 %
slower). With several ranks each scores its share of the haystacks, or, where several masks are
scored at once, of the masks.

Masks that agree below a layer have the same hidden states there. So a state that enters a layer is
cached for a haystack and a prefix of a mask, `z[:layer]`."""
# B batch (1), T tokens, N rows that predict answer tokens, C hidden size, V vocabulary

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, pairwise
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

CPU_MEMORY_GB = 1.0  # default for cached states


class Answer(NamedTuple):
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
        self._seen: set[Z] = set()  # z[:layer] of the masks so far
        self._last: tuple[Z, int] | None = None  # the newest mask, and where it branched off
        rank, ranks = rank_and_size()
        # Each team of ranks scores masks of its own; its ranks divide the haystacks among them.
        self.num_teams = math.gcd(ranks, masks_at_once)
        self.team_size = size = ranks // self.num_teams
        self.team = rank // size
        num_mine = max(1, -(-len(calibration.haystacks) // size))
        cache_bytes = self._cache_bytes(model.device) // num_mine
        self.haystacks = {
            number: LoadedHaystack(haystack, model.device, cache_bytes)
            for number, haystack in enumerate(calibration.haystacks)
            if number % size == rank % size
        }
        first = calibration.haystacks[0].ids_T[:64]
        self.layers.check(first.to(model.device))

    def score(self, z: Z, haystacks: Sequence[int]) -> tuple[dict[int, list[Answer]], float]:
        """The answers in some of this rank's haystacks, and the layer-forwards they took."""
        before = self.layers.work
        answers = {number: self._answers(self.haystacks[number], z) for number in haystacks}
        return answers, self.layers.work - before

    def share(self, haystacks: Sequence[int], index: int, num_masks: int) -> list[int]:
        """Those of the haystacks that this rank scores for one of several masks. A single mask is
        divided among the teams."""
        return [
            number
            for number in haystacks
            if number in self.haystacks
            and (index if num_masks > 1 else number // self.team_size) % self.num_teams == self.team
        ]

    @torch.inference_mode()
    def _answers(self, haystack: "LoadedHaystack", z: Z) -> list[Answer]:
        log_NV = self.layers.log_probabilities(self._run(haystack, z))
        logs = log_NV.gather(1, haystack.targets_N[:, None])[:, 0].double().tolist()
        right = (log_NV.argmax(-1) == haystack.targets_N).tolist()
        answers = [Answer(all(right[i:j]), math.fsum(logs[i:j])) for i, j in haystack.bounds]
        if any(math.isnan(answer.log_probability) for answer in answers):
            raise UserError(OVERFLOW)
        return answers

    def _run(self, haystack: "LoadedHaystack", z: Z) -> Tensor:
        """(1, N, C): the top layer's hidden states, in the rows that predict answers."""
        use, top = self.accelerations, len(z) - 1
        branch = self._branch(z)
        hidden_BTC, rotary = self.layers.embed(haystack.ids_T)
        # With room for several masks cache all layers. Otherwise only those where masks differ, and
        # every third of the dense model's, or as many as fit: a probe windows one layer alone.
        room = haystack.capacity_bytes // hidden_BTC.nbytes
        is_roomy, spacing = room >= 4 * len(z), max(3, -(-len(z) // max(1, room)))
        start = 0
        for layer in range(1, branch + 1) if use.prefixes else ():  # uses all, so that others go
            if (cached_BTC := haystack.cached(z[:layer])) is not None:
                start, hidden_BTC = layer, cached_BTC
        for layer in range(start, len(z)):
            is_kept = layer == branch or (layer % spacing == 0 and all(map(all, z[:layer])))
            if use.prefixes and layer > start and (is_roomy or is_kept):
                haystack.cache(z[:layer], hidden_BTC)
            rows_N = haystack.rows_N if use.answer_rows and layer == top else None
            hidden_BTC = self.layers.run(layer, hidden_BTC, rotary, z[layer], rows_N)
        return hidden_BTC if use.answer_rows else hidden_BTC[:, haystack.rows_N]

    def _branch(self, z: Z) -> int:
        """The lowest layer in which this mask differs from all earlier ones. Calls with the same
        mask in a row return the same."""
        if self._last is None or self._last[0] != z:
            prefixes = [z[:layer] for layer in range(1, len(z))]
            known = sum(prefix in self._seen for prefix in prefixes)
            self._seen.update(prefixes)
            self._last = z, min(known, len(z) - 1)
        return self._last[1]

    def _cache_bytes(self, device: torch.device) -> int:
        """For the cached states of all haystacks."""
        given = self.accelerations.memory_gb
        if given is None and device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0] // 2
        return int((CPU_MEMORY_GB if given is None else given) * (1 << 30))


class LoadedHaystack:
    """A haystack on the model's device, with its cached states. Each haystack has its own cache:
    they run in turn, and in a shared cache each would evict the next."""

    def __init__(self, haystack: Haystack, device: torch.device, cache_bytes: int) -> None:
        # The last token of the last answer predicts nothing of interest.
        last = max(question.answer.stop for question in haystack.questions) - 1
        self.ids_T = haystack.ids_T[:last].to(device)
        rows = [row for question in haystack.questions for row in question.predicting]
        self.rows_N = torch.tensor(rows, device=device)
        self.targets_N = haystack.ids_T.to(device)[self.rows_N + 1]
        self.capacity_bytes = cache_bytes
        self._states: OrderedDict[Z, Tensor] = OrderedDict()  # by prefix
        self._bytes = 0
        lengths = (len(question.answer) for question in haystack.questions)
        self.bounds = [*pairwise(accumulate(lengths, initial=0))]  # the rows of each question

    def cached(self, prefix: Z) -> Tensor | None:
        if prefix in self._states:
            self._states.move_to_end(prefix)
        return self._states.get(prefix)

    def cache(self, prefix: Z, hidden_BTC: Tensor) -> None:
        """Cache the states if they fit; the least recently used are dropped first."""
        if (old_BTC := self._states.pop(prefix, None)) is not None:
            self._bytes -= old_BTC.nbytes
        if hidden_BTC.nbytes > self.capacity_bytes:
            return
        while self._bytes + hidden_BTC.nbytes > self.capacity_bytes:
            self._bytes -= self._states.popitem(last=False)[1].nbytes
        self._states[prefix] = hidden_BTC
        self._bytes += hidden_BTC.nbytes
