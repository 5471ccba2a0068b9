"""However a text is generated, in every family: the tokens are those of recomputation without a
cache, and the memory of window groups is really freed."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import QuantizedLayer

from bosch.attention.cache import CACHE, HybridLayer, allocated_bytes, kv_bytes
from bosch.attention.register import mention_plain_cache
from bosch.eval.prompt_cache import keep_everything, keep_windows_only, new_cache
from bosch.hybrid.conversion import deploy, head_size
from bosch.masks.mask import GroupMask
from tests.model_factory import (
    MIXED,
    families_with,
    family_parameters,
    generate_anew,
    random_tokens,
    tiny_model,
)

WINDOW, PROMPT, NEW = 16, 50, 12
MASK = GroupMask.from_rows(MIXED, WINDOW)


class Lossless(QuantizedLayer):
    """Packs and unpacks as quantized layers do, without a loss, so that tokens can be compared, and
    without the packages that transformers' own kinds need."""

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, float]:
        return tensor / 4, 4.0

    def _dequantize(self, q_tensor: tuple[Tensor, float]) -> Tensor:
        numbers, step = q_tensor
        return numbers * step


class LosslessCache(QuantizedCache):
    def __init__(self, num_layers: int) -> None:
        super(QuantizedCache, self).__init__(layers=[Lossless() for _ in range(num_layers)])


def hybrid(family: str, window_tokens: int = WINDOW) -> PreTrainedModel:
    model = deploy(tiny_model(family), MIXED, window_tokens)
    model.generation_config.pad_token_id = 0
    return model


def often_wrong(model: PreTrainedModel) -> PreTrainedModel:
    """An assistant whose tokens are removed from both caches again."""
    assistant = hybrid(model.config.model_type.removeprefix("bosch_"), 5)
    for weights in assistant.parameters():
        weights.data += 0.02 * torch.randn_like(weights)
    return assistant


def own(make: Callable[[PreTrainedModel], Any]) -> Callable[[PreTrainedModel], dict[str, Any]]:
    return lambda model: {CACHE: make(model)}


WAYS: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "dynamic": lambda model: {},
    "chunks of 7": lambda model: {"prefill_chunk_size": 7},
    "chunks of 16": lambda model: {"prefill_chunk_size": 16},
    "beams": lambda model: {"num_beams": 3},
    "assisted": lambda model: {"assistant_model": often_wrong(model)},
    "assisted by itself": lambda model: {"assistant_model": model},
    "prompt lookup": lambda model: {"prompt_lookup_num_tokens": 3},
    "offloaded": own(lambda model: DynamicCache(config=model.config)),
    "own dynamic": own(lambda model: DynamicCache()),
    "static": lambda model: {"cache_implementation": "static"},
    "static in chunks": lambda model: {"cache_implementation": "static", "prefill_chunk_size": 7},
    "own static": own(lambda model: StaticCache(model.config, max_cache_len=PROMPT + NEW)),
    "quantized": own(lambda model: LosslessCache(model.config.num_hidden_layers)),
}
MOST = ("dynamic", "chunks of 16", "assisted", "static")  # what prompts about a window long meet


@functools.cache
def tokens_anew(family: str, prompt: int) -> Tensor:
    """By recomputation, which all ways must agree with."""
    return generate_anew(hybrid(family), random_tokens(1, prompt), NEW)


def generated(model: PreTrainedModel, way: str, prompt: int, anew: Tensor) -> Any:
    """What `generate` returns; its tokens are checked. `anew`: those of recomputation."""
    options = WAYS[way](model) | {"max_new_tokens": NEW, "do_sample": False}
    options |= {"disable_compile": True, "return_dict_in_generate": True}
    ids = random_tokens(1, prompt)
    made = model.generate(ids, **options)
    if way == "beams":
        anew = model.generate(ids, **options, use_cache=False).sequences
    assert torch.equal(made.sequences, anew)
    return made


@pytest.mark.ecosystem(
    "generate: static and dynamic caches, prefill in chunks, prompt lookup",
    "works",
    "The same tokens as without a cache.",
)
@pytest.mark.parametrize(
    ("family", "way", "prompt"),
    [
        *families_with([(way, PROMPT) for way in WAYS], step=4),
        *(
            pytest.param("qwen3", way, WINDOW + more, marks=() if way in MOST else pytest.mark.slow)
            for way in WAYS
            for more in (-1, 0, 1)
        ),
    ],
)
def test_tokens_are_right_and_only_the_needed_is_held(way: str, family: str, prompt: int) -> None:
    model = hybrid(family)
    held = generated(model, way, prompt, tokens_anew(family, prompt))[CACHE]
    length = prompt + NEW - 1  # without the last
    assert all(isinstance(layer, HybridLayer) for layer in held.layers)
    size, number = head_size(model.config), 4  # float32
    if way == "quantized":
        for layer, row in zip(held.layers, MIXED, strict=True):
            assert isinstance(layer.full, Lossless) == any(row)
            if layer.window is not None:
                assert [x.shape[1:3] for x in (layer.window.keys, layer.window.values)] == [
                    (row.count(0), WINDOW - 1)
                ] * 2
        return
    if "static" in way:
        room = PROMPT + NEW if way == "own static" else length
        slots = MASK.num_windowed * WINDOW + (MASK.num_total - MASK.num_windowed) * room
        assert kv_bytes(held) == 2 * slots * size * number
    else:
        rows = 3 if way == "beams" else 1
        assert kv_bytes(held) == MASK.kv_bytes(length, size, number) * rows
        # Views may keep more alive than they show.
        assert allocated_bytes(held) <= MASK.allocated_bytes(length, size, number) * rows


@pytest.mark.parametrize("family", family_parameters())
@torch.no_grad()
def test_what_is_allocated_is_what_was_computed(family: str) -> None:
    """By ours, for a hybrid and for the dense model; transformers' own has no spare room."""
    model = hybrid(family)
    dense, size = tiny_model(family), head_size(model.config)
    all_full = GroupMask.from_rows([[1] * len(row) for row in MIXED], WINDOW)
    for length in (1, WINDOW - 1, WINDOW, PROMPT, 400):
        for runner, mask, cache in (
            (model, MASK, new_cache(model.config)),
            (dense, all_full, new_cache(dense.config)),
        ):
            for piece in (length, 1):
                runner(random_tokens(1, piece), **{CACHE: cache}, use_cache=True)
            # The first new token uses of the room that was made with the prompt.
            assert kv_bytes(cache) == mask.kv_bytes(length + 1, size, 4)
            assert allocated_bytes(cache) == mask.allocated_bytes(length, size, 4)
        plain = DynamicCache(config=dense.config)
        dense(random_tokens(1, length), **{CACHE: plain}, use_cache=True)
        assert allocated_bytes(plain) == MASK.dense_kv_bytes(length, size, 4)


@torch.no_grad()
def test_the_bound_holds_at_every_step() -> None:
    """Also of a long text, and where recorded tokens are removed again."""
    model = hybrid("qwen3")
    size = head_size(model.config)
    for pieces in ([400, *[1] * 60], [*[7] * 40, 90, 1, 1], [1] * 70):
        cache, length = new_cache(model.config), 0
        for piece in pieces:
            model(random_tokens(1, piece), **{CACHE: cache}, use_cache=True)
            length += piece
            assert kv_bytes(cache) == MASK.kv_bytes(length, size, 4)
            assert allocated_bytes(cache) <= MASK.allocated_bytes(length, size, 4)
    cache, length = new_cache(model.config), 0
    keep_everything(cache)
    for piece, removed in ((300, 4), (30, 29), (120, 0)):
        model(random_tokens(1, piece), **{CACHE: cache}, use_cache=True)
        cache.crop(-removed)
        length += piece - removed
        assert kv_bytes(cache) == MASK.kv_bytes(length, size, 4)
        assert allocated_bytes(cache) <= MASK.allocated_bytes(length, size, 4)
    model(random_tokens(1, 200), **{CACHE: cache}, use_cache=True)
    keep_windows_only(cache)
    assert kv_bytes(cache) == MASK.kv_bytes(length + 200, size, 4)
    assert allocated_bytes(cache) <= MASK.allocated_bytes(length + 200, size, 4)


@pytest.mark.parametrize("name", ["cache", "past_key_values", None])
@torch.no_grad()
def test_the_cache_goes_by_both_names_and_by_position(name: str | None) -> None:
    model, cache, ids = hybrid("qwen3"), DynamicCache(), random_tokens(1, PROMPT)
    out = model(ids, **{name: cache}) if name else model(ids, None, None, cache)
    assert out[CACHE] is cache
    assert kv_bytes(cache) == MASK.kv_bytes(PROMPT, head_size(model.config), 4)


@torch.no_grad()
def test_a_plain_cache_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    model, cache = hybrid("qwen3"), DynamicCache()
    mention_plain_cache.cache_clear()
    for length in (PROMPT, 1, 1):  # the base model alone knows nothing of our caches
        assert "no memory is saved" not in caplog.text or length == 1
        model.model(random_tokens(1, length), use_cache=True, **{CACHE: cache})
    assert caplog.text.count("no memory is saved") == 1
