"""The memory of window groups is really freed, in every family, however a text is generated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import QuantizedLayer

from bosch.hybrid.attention import mention_plain_cache
from bosch.hybrid.cache import CACHE, HybridLayer, held_tensors, kv_bytes
from bosch.hybrid.conversion import deploy, head_size
from bosch.masks.mask import GroupMask
from tests.model_factory import FAMILIES, MIXED, generate_anew, random_tokens, tiny_model

WINDOW, PROMPT, NEW = 16, 50, 12
LENGTH = PROMPT + NEW - 1  # the last token is never read
MASK = GroupMask.from_rows(MIXED, WINDOW)


class Bytes(QuantizedLayer):
    """Quantized in the plainest way, without the packages that transformers' own kinds need."""

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        step = tensor.abs().amax() / 127
        return (tensor / step).round().to(torch.int8), step

    def _dequantize(self, q_tensor: tuple[Tensor, Tensor]) -> Tensor:
        numbers, step = q_tensor
        return numbers * step


class BytesCache(QuantizedCache):
    def __init__(self, num_layers: int) -> None:
        super(QuantizedCache, self).__init__(layers=[Bytes() for _ in range(num_layers)])


def hybrid(family: str, window_tokens: int = WINDOW) -> PreTrainedModel:
    model = deploy(tiny_model(family), MIXED, window_tokens)
    model.generation_config.pad_token_id = 0
    return model


def own(make: Callable[[PreTrainedModel], Any]) -> Callable[[PreTrainedModel], dict[str, Any]]:
    return lambda model: {CACHE: make(model)}


WAYS: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "dynamic": lambda model: {},
    "chunked prefill": lambda model: {"prefill_chunk_size": 7},
    "beams": lambda model: {"num_beams": 3},
    "assisted": lambda model: {"assistant_model": hybrid(model.config.model_type[6:], 5)},
    "prompt lookup": lambda model: {"prompt_lookup_num_tokens": 3},
    "offloaded": own(lambda model: DynamicCache(config=model.config)),
    "own dynamic": own(lambda model: DynamicCache()),
    "static": lambda model: {"cache_implementation": "static", "disable_compile": True},
    "own static": own(lambda model: StaticCache(model.config, max_cache_len=LENGTH + 1)),
    "quantized": own(lambda model: BytesCache(model.config.num_hidden_layers)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_recomputation_and_only_what_the_mask_needs_is_held(
    way: str, family: str
) -> None:
    model, ids = hybrid(family), random_tokens(1, PROMPT)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False} | WAYS[way](model)
    options |= {} if way == "own static" else {"disable_compile": True}
    made = model.generate(ids, return_dict_in_generate=True, **options)
    cache = made[CACHE]
    if way not in ("beams", "quantized"):
        assert torch.equal(made.sequences, generate_anew(model, ids, NEW))
    assert all(isinstance(layer, HybridLayer) for layer in cache.layers)
    size, number = head_size(model.config), 4  # float32
    if way == "quantized":
        for layer, row in zip(cache.layers, MIXED, strict=True):
            assert isinstance(layer.full, Bytes) == any(row)
            if layer.window is not None:
                assert [x.shape[1:3] for x in (layer.window.keys, layer.window.values)] == [
                    (row.count(0), WINDOW - 1)
                ] * 2
        return
    if "static" in way:
        room = LENGTH + 1 if way == "own static" else LENGTH
        slots = MASK.num_windowed * WINDOW + (MASK.num_total - MASK.num_windowed) * room
        assert kv_bytes(cache) == 2 * slots * size * number
    else:
        expected = MASK.kv_bytes(LENGTH, size, number) * (3 if way == "beams" else 1)
        assert kv_bytes(cache) == expected
        # Views may keep more alive than they show.
        alive = {x.untyped_storage() for layer in cache.layers for x in held_tensors(layer)}
        room = 2 * size * number * MASK.num_total * 400 * (3 if way == "beams" else 1)
        assert sum(storage.nbytes() for storage in alive) <= room


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_both_names_of_the_cache_are_understood(name: str) -> None:
    model, cache = hybrid("qwen3"), DynamicCache()
    model(random_tokens(1, PROMPT), **{name: cache})
    assert kv_bytes(cache) == MASK.kv_bytes(PROMPT, head_size(model.config), 4)


@torch.no_grad()
def test_a_plain_cache_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    model, cache = hybrid("qwen3"), DynamicCache()
    mention_plain_cache.cache_clear()
    for length in (PROMPT, 1, 1):  # the base model alone knows nothing of our caches
        assert "no memory is saved" not in caplog.text or length == 1
        model.model(random_tokens(1, length), use_cache=True, **{CACHE: cache})
    assert caplog.text.count("no memory is saved") == 1
