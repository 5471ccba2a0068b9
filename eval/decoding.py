"""Steps of decoding for a batch: one token for each text, from its cache.

`RollingSteps` call the model with the dynamic cache. `GraphSteps` have a static one, of which each
step is the same operations: on a GPU they are captured once, as a CUDA graph, and replayed, so that
a token costs no launches from Python. That is the default on GPUs; on a CPU it is slower.
"""
# N texts, T tokens of the longest, S slots, V vocabulary

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache

from bosch.attention.cache import CACHE
from bosch.attention.documents import MASK_TYPE
from bosch.attention.register import NAME
from bosch.attention.search_mode import MASKED
from bosch.eval.prompt_cache import move_to_slots

logger = logging.getLogger("bosch")

WARM = 2  # steps before the capture: kernels are chosen and memory is taken outside of it


class Steps(Protocol):
    def __call__(self, ids_N: Tensor) -> Tensor:
        """Logits (N, V) after one more token of each text."""

    def keep(self, texts: Sequence[int]) -> None:
        """Go on with these only."""


class RollingSteps:
    """Texts are joined at their right ends, where the next token goes in all of them:

    . . x x x     . is padding, which the mask hides
    x x x x x
    """

    def __init__(self, model: Any, cache: Cache, lengths: Sequence[int]) -> None:
        self.model, self.cache = model, cache
        self.is_ours = model.config._attn_implementation == NAME
        self.mask_NT = mask_of(lengths, model.device)
        self.lengths, self.longest = list(lengths), max(lengths)

    def __call__(self, ids_N: Tensor) -> Tensor:
        self.mask_NT = torch.nn.functional.pad(self.mask_NT, (0, 1), value=1)
        arguments: dict[str, Any] = {"use_cache": True, CACHE: self.cache}
        if min(self.lengths) < self.longest:  # some are padded
            # Of a mask (N, T) our attention would ask the device at each step if it hides anything.
            mask = self.mask_NT[:, None, None] if self.is_ours else self.mask_NT.long()
            # Padding on the left has no place: a text's first token is at 0.
            positions = self.mask_NT.sum(1, keepdim=True) - 1
            arguments |= {"attention_mask": mask, "position_ids": positions}
        # Else none: a mask of ones would cost attention without masks, which is faster.
        logits_NTV: Tensor = self.model(ids_N[:, None], **arguments).logits
        return logits_NTV[:, -1]

    def keep(self, texts: Sequence[int]) -> None:
        cache: Any = self.cache
        texts_N = torch.tensor(texts, device=self.mask_NT.device)
        cache.batch_select_indices(texts_N)
        self.mask_NT, self.lengths = self.mask_NT[texts_N], [self.lengths[n] for n in texts]


def takes_slots(model: Any) -> bool:
    """Whether `GraphSteps` can step this model: its attention has to hide keys by a mask of
    booleans (eager adds the mask to the scores), and search mode has no static cache."""
    config = model.config
    return config._attn_implementation in (NAME, "sdpa") and getattr(model, MASKED, None) is None


class GraphSteps:
    """The same for at most `num_steps` steps. Texts that have ended stay in the batch, since a
    graph has a fixed size; nobody reads them."""

    def __init__(self, model: Any, cache: Cache, lengths: Sequence[int], num_steps: int) -> None:
        self.model, self.column = model, max(lengths)
        self.cache = move_to_slots(cache, model.config, self.column + num_steps)
        mask_NT = mask_of(lengths, model.device)
        self.positions_N1 = mask_NT.sum(1, keepdim=True)
        self.ids_N1 = torch.zeros_like(self.positions_N1)
        is_hybrid = getattr(model.config, "bosch", None) is not None
        # Without padding a hybrid needs no mask: its cache knows what is filled.
        self.mask_N11S: Tensor | None = None
        if min(lengths) < self.column or not is_hybrid:
            is_ours = model.config._attn_implementation == NAME
            padded_NS = torch.nn.functional.pad(mask_NT, (0, num_steps))
            self.mask_N11S = padded_NS[:, None, None].to(MASK_TYPE if is_ours else torch.bool)
        self.texts_N = torch.arange(len(lengths), device=model.device)
        self.num_done, self._run = 0, self._call

    def __call__(self, ids_N: Tensor) -> Tensor:
        # In place: a graph reads the same memory each time.
        self.ids_N1[self.texts_N, 0] = ids_N
        if self.mask_N11S is not None:
            self.mask_N11S[..., self.column] = 1
        if self.num_done == WARM:
            self._run = captured(self._call, self.model.device)
        logits_NV = self._run()
        self.positions_N1 += 1
        self.column += 1
        self.num_done += 1
        return logits_NV[self.texts_N]

    def _call(self) -> Tensor:
        arguments: dict[str, Any] = {"use_cache": True, CACHE: self.cache}
        if self.mask_N11S is not None:
            arguments["attention_mask"] = self.mask_N11S
        logits_NTV: Tensor = self.model(
            self.ids_N1, position_ids=self.positions_N1, **arguments
        ).logits
        return logits_NTV[:, -1]

    def keep(self, texts: Sequence[int]) -> None:
        self.texts_N = self.texts_N[texts]


def captured(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """The step as a CUDA graph, whose result is always in the same memory; on a CPU as it is."""
    if device.type != "cuda":
        return step
    stream = torch.cuda.current_stream()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # what is captured does not run
            result = step()
    except RuntimeError as error:  # something in the model waits for the GPU
        torch.cuda.set_stream(stream)  # a capture that failed may not leave its own
        first_line = str(error).partition("\n")[0]
        logger.warning("decoding without a CUDA graph, which is slower: %s", first_line)
        return step

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def mask_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """(N, T): 1 for tokens, 0 for the padding before them."""
    longest, lengths_N1 = max(lengths), torch.tensor(lengths, device=device)[:, None]
    return (torch.arange(longest, device=device) >= longest - lengths_N1).to(MASK_TYPE)
