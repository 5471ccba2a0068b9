"""KV caches that can be copied up to any position, so that prompts that begin alike (one context
with several questions) share a prefill, and joined into a batch of any lengths."""
# B batch, G KV heads, S tokens held, D head size

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PretrainedConfig, StaticCache
from transformers.cache_utils import DynamicLayer

from bosch.attention.cache import GrowingLayer, HybridLayer, RollingLayer, hybridize_cache
from bosch.sink import Sink


def new_cache(config: PretrainedConfig) -> Cache:
    """An empty dynamic cache for a model of this config, dense or hybrid."""
    cache = DynamicCache(config=config)
    if getattr(config, "bosch", None) is not None:
        return hybridize_cache(cache, config, Sink.of_hybrid(config))
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        cache.layers = [GrowingLayer() for _ in cache.layers]  # no copy for each new token
    return cache


def can_copy(cache: Cache) -> bool:
    """Whether the functions below support this cache: no native windows, no recurrent states, and
    no first tokens kept as sinks, of which a copy would have to know where each text begins."""
    known = all(type(layer) in (GrowingLayer, RollingLayer, HybridLayer) for layer in cache.layers)
    return bool(cache.layers) and known and not any(getattr(x, "first", None) for x in cache.layers)


def keep_everything(cache: Cache) -> None:
    """Let window groups keep positions that leave the window, from now on."""
    for layer in cache.layers:
        if isinstance(layer, HybridLayer):
            layer.activate_past_recording()


def keep_windows_only(cache: Cache) -> None:
    """Let window groups keep no more than their window again, and free the rest."""
    for layer in cache.layers:
        if isinstance(layer, HybridLayer):
            layer.record_past = False


def copy_cache(cache: Cache, num_tokens: int, whole: bool = False) -> Cache:
    """A copy of the first positions of a cache with one sequence. `whole`: window groups hold all
    positions and keep every new one, so the copy can itself be copied at any position."""
    assert can_copy(cache), "a copy would not answer as this cache does; ask can_copy first"
    copy = DynamicCache()
    copy.layers = [_copy_layer(layer, num_tokens, whole) for layer in cache.layers]
    return copy


def join_caches(caches: Sequence[Cache]) -> Cache:
    """One cache for several sequences. Shorter ones are padded on the left, which the attention
    mask must hide."""
    if len(caches) == 1:
        return caches[0]
    joined = DynamicCache()
    columns = zip(*(cache.layers for cache in caches), strict=True)
    joined.layers = [_join_layers(column) for column in columns]
    return joined


def move_to_slots(cache: Cache, config: PretrainedConfig, max_tokens: int) -> Cache:
    """A static cache (bosch/attention/slots.py) with the tokens of this dynamic one, which is empty
    afterwards, and room for so many."""
    static: Any = StaticCache(config=config, max_cache_len=max_tokens)
    if getattr(config, "bosch", None) is not None:
        hybridize_cache(static, config, Sink.of_hybrid(config))
    for number, layer in enumerate(static.layers):
        # One after the other, so that hardly more memory is taken than by one of the two.
        held: Any = cache.layers[number]
        cache.layers[number] = GrowingLayer()
        if isinstance(layer, HybridLayer):
            layer.fill(held)
        else:
            layer.update(held.keys, held.values)
    made: Cache = static
    return made


def _copy_layer(layer: Any, num_tokens: int, whole: bool) -> Any:
    if isinstance(layer, HybridLayer):
        full = layer.full and _copy_layer(layer.full, num_tokens, whole)
        window = layer.window and _copy_layer(layer.window, num_tokens, whole)
        return HybridLayer(full, window, layer.num_full, layer.max_tokens)
    # What a layer holds of a text, and what a copy of `num_tokens` takes from it:
    #
    #     position   0 1 2 3 4 5 6 7 8
    #     held             [3 4 5 6 7 8]      first = 3: a window has left 0 to 2
    #     copy of 7          [4 5 6]          size = 3: W = 4, of which one is the query
    first, size = 0, num_tokens
    if isinstance(layer, RollingLayer):
        first = layer.cumulative_length - layer.num_held
        size = num_tokens if whole else min(num_tokens, layer.window_tokens - 1)
    begin = num_tokens - size - first
    assert begin >= 0, "the cache no longer holds these positions"
    keys, values = (x[:, :, begin : begin + size] for x in (layer.keys, layer.values))
    return _filled(layer, keys, values, num_tokens, whole)


def _join_layers(layers: Sequence[Any]) -> Any:
    first = layers[0]
    if isinstance(first, HybridLayer):
        full = first.full and _join_layers([layer.full for layer in layers])
        window = first.window and _join_layers([layer.window for layer in layers])
        return HybridLayer(full, window, first.num_full, first.max_tokens)
    longest = max(layer.keys.shape[2] for layer in layers)
    keys, values = (
        torch.cat([pad(x, (0, 0, longest - x.shape[2], 0)) for x in rows_BGSD])
        for rows_BGSD in zip(*((layer.keys, layer.values) for layer in layers), strict=True)
    )
    num_tokens = max(layer.get_seq_length() for layer in layers)
    return _filled(first, keys, values, num_tokens, False)


def _filled(layer: Any, k_BGSD: Tensor, v_BGSD: Tensor, num_tokens: int, whole: bool) -> Any:
    if not isinstance(layer, RollingLayer):
        filled = GrowingLayer()
        filled.update(k_BGSD, v_BGSD)
        return filled
    rolling = RollingLayer(layer.window_tokens, layer.has_sink)
    rolling.record_past = whole
    rolling.update(k_BGSD, v_BGSD)
    rolling.cumulative_length = num_tokens
    return rolling
