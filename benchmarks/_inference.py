"""A prompt read in chunks and tokens decoded one by one, each step with time and peak memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from benchmarks._memory import PeakMemory
from benchmarks._timing import now


@dataclass(frozen=True)
class Step:
    tokens: int
    seconds: float
    peak_bytes: int | None  # None where the system does not tell


def empty_cache(model: PreTrainedModel) -> Cache:
    """What `generate` would take: transformers' own, which a hybrid turns into one of its own."""
    return DynamicCache(config=model.config)


@torch.inference_mode()
def prefill(
    model: PreTrainedModel, ids_BT: Tensor, cache: Cache, chunk_tokens: int | None = None
) -> Iterator[Step]:
    """Read a prompt into the cache, one step a chunk (None: in one piece). Of a chunk's logits only
    the last token's.
    """
    for ids in ids_BT.split(chunk_tokens or ids_BT.shape[1], dim=1):
        yield _step(model, ids, cache)


@torch.inference_mode()
def decode(model: PreTrainedModel, ids_BT: Tensor, cache: Cache, num_tokens: int) -> Iterator[Step]:
    """One step a token. The tokens are given: which they are changes no time."""
    for token in ids_BT[:, :num_tokens].split(1, dim=1):
        yield _step(model, token, cache)


def _step(model: PreTrainedModel, ids_BT: Tensor, cache: Cache) -> Step:
    memory = PeakMemory(ids_BT.device)
    begin = now(ids_BT.device)
    model(ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return Step(ids_BT.shape[1], now(ids_BT.device) - begin, memory.read())
