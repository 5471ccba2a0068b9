"""The KV cache of a hybrid: all positions for full groups, the last W-1 for groups with a window.

`hybridize_cache` replaces the layers of a new cache of transformers (dynamic, static, quantized or
offloaded) with `HybridLayer`s; `generate` and `forward` of our models call it. A `HybridLayer`
returns a `Split` in the place of keys and of values, which transformers passes to the attention.

What a `HybridLayer` consists of:

    cache      full groups                    groups with a window    and with the sink tokens=S
    dynamic    GrowingLayer, or quantized     RollingLayer            FirstLayer
    static     SlotLayer                      RingLayer               FirstLayer      (slots.py)

A token that is decoded sees a static sink as one more entry of the window's keys and values: the
cache has a place for it, and the attention function, which knows the constants, writes them there.
"""
# B batch, G kv heads, T new tokens, S tokens held, L tokens of the window part, N first tokens, D
# head size

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from bosch.attention.documents import hides_nothing
from bosch.attention.slots import Clock, RingLayer, SlotLayer, Step
from bosch.masks.window import own_window, spare_tokens
from bosch.run.errors import UserError
from bosch.sink import NO_SINK, Sink

# The name of a model's cache among its arguments and outputs: transformers 5.24 renamed it.
_ARGUMENTS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _ARGUMENTS else "past_key_values"

Pair = tuple[Tensor, Tensor]  # keys and values


class Split(NamedTuple):
    """Keys and values of one layer, with the new tokens; a part without groups is None."""

    full: Pair | None
    window: Pair | None  # the last L positions in order, or with `step` the ring (slots.py)
    first_query: int | Tensor  # position of the first new token; a 0-dim tensor in a static cache
    first: Pair | None = None  # of the window's groups, the first tokens that they keep
    step: Step | None = None  # a static cache decodes one token: both parts have empty slots
    # The window has a static sink as an entry: its first one, or with `step` its last.
    has_sink_entry: bool = False
    # (B, G, D), where the constants have to be written; or one of (2B, G, D), keys and then values.
    sink_place: Pair | Tensor | None = None


class GrowingLayer(DynamicLayer):
    """All positions, in buffers with room for a few more (`spare_tokens`).

        buffer    - - - 3 4 5 6 7 - -        `keys` and `values` are views from `_start` to `_stop`.
                        |         |          New tokens are written at `_stop`. Only a subclass that
                     _start     _stop        forgets old ones moves `_start`.

    (transformers' `DynamicLayer` copies all keys and values for each new token.) Keys and values
    are halves of one buffer, so that new ones of both are one write.
    """

    def __init__(self) -> None:
        # No super().__init__(): it would assign to the properties `keys` and `values`.
        self.reset()

    # Properties, because most steps of decoding never read them: as attributes, each step would
    # make views of what it keeps beside those of what it returns.
    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return self._held()[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self._held()[1] if self.is_initialized else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        # Not views, which would keep the first tokens alive.
        k, v = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (key_states, value_states))
        self._hold(k, v)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append(key_states, value_states)
        self.cumulative_length += key_states.shape[2]
        return self._held()

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        remove = min(_tokens_to_remove(tokens_to_remove), self.num_held)
        self._stop -= remove
        self.cumulative_length -= remove
        self._shrink()

    def reset(self) -> None:
        self._buffers: Pair | None = None
        self._both: Tensor | None = None  # (2B, G, S, D): the buffers in one, if they are
        self._start = self._stop = 0  # the part of the buffers in use
        self.cumulative_length = 0  # tokens seen, of which a subclass may hold the last ones only
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change_rows(lambda x: x[indices.to(x.device)])

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Others than rows are changed where keys move to another device."""
        self._change(change)

    def offload(self) -> None:
        self._change(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._change(lambda x: x.to(self.device, non_blocking=True))

    @property
    def num_held(self) -> int:
        return self._stop - self._start

    def _held(self, last: int | None = None) -> Pair:
        assert self._buffers is not None
        (k, v), start = self._buffers, self._start if last is None else self._stop - last
        return k[:, :, start : self._stop], v[:, :, start : self._stop]

    def _hold(self, k_BGSD: Tensor, v_BGSD: Tensor) -> None:
        """All of these tensors and nothing else: buffers without room."""
        self._buffers, self._start, self._stop = (k_BGSD, v_BGSD), 0, k_BGSD.shape[2]
        self._both = None

    def _append(self, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        assert self._buffers is not None
        held, new, buffer = self.num_held, k_BGTD.shape[2], self._buffers[0]
        needs_grad = any(x.requires_grad for x in (k_BGTD, v_BGTD, *self._buffers))
        if torch.is_grad_enabled() and needs_grad:
            # Autograd may still need what was read from the buffer, so it is not overwritten.
            k, v = self._held()
            self._hold(torch.cat([k, k_BGTD], 2), torch.cat([v, v_BGTD], 2))
            return
        if self._stop + new > buffer.shape[2] or _is_frozen(buffer):
            self._move(self._most_room(held + new), new)
        if self._both is not None and new == 1 and not torch.compiler.is_compiling():
            torch.cat((k_BGTD, v_BGTD), out=self._both.narrow(2, self._stop, 1))
        else:
            for target, x_BGTD in zip(self._buffers, (k_BGTD, v_BGTD), strict=True):
                target[:, :, self._stop : self._stop + new] = x_BGTD
        self._stop += new

    def _most_room(self, num_tokens: int) -> int:
        """Of a buffer for so many tokens."""
        return num_tokens + spare_tokens(num_tokens)

    def _move(self, room: int, new: int = 0, start: int = 0) -> None:
        """What is held, to new buffers of this room, in which so many new tokens must have some."""
        stop, both = start + self.num_held, None
        (batch, groups, _, size), of_v = (x.shape for x in self._held())
        if size == of_v[3]:
            both = self._held()[0].new_empty(2 * batch, groups, room, size)
            k, v = both[:batch], both[batch:]
        else:
            k, v = (x.new_empty(*x.shape[:2], room, x.shape[3]) for x in self._held())
        for target, x_BGSD in zip((k, v), self._held(), strict=True):
            target[:, :, start:stop] = x_BGSD
        self._buffers, self._both, self._start, self._stop = (k, v), both, start, stop

    def _shrink(self) -> None:
        """Give memory back after tokens were removed, perhaps most of them: the buffer of a long
        text must not outlive it."""
        if self._buffers is None or self._buffers[0].requires_grad:
            return
        if self._buffers[0].shape[2] > (room := self._most_room(self.num_held)):
            self._move(room)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        # Also for an empty buffer, as with W = 1: its batch size counts.
        if self._buffers is not None:
            self._hold(*map(change, self._held()))


class RollingLayer(GrowingLayer):
    """The last W-1 positions, which a new token sees besides itself. `update` returns them followed
    by the new ones, which are written behind them. With W = 4, and room for two steps more:

        holds 3 4 5           - 3 4 5 -        _start has moved before
        token 6 comes         - 3 4 5 6        returned: 3 4 5 6; then 3 is dropped, nothing copied
        token 7 comes         4 5 6 7 -        the buffer was full: 4 5 6 move to the beginning of a
                                               new one, once in as many steps as there is room for

    With `record_past` (assisted decoding) nothing is dropped until the next `crop`, so that
    rejected tokens can be removed.
    """

    def __init__(self, window_tokens: int, has_sink: bool = False) -> None:
        super().__init__()
        self.window_tokens = window_tokens
        # A static one. Its place is before the window, where a token was that has left it; a new
        # buffer begins with an empty place for it.
        self.has_sink = has_sink
        self.num_spare = spare_tokens(window_tokens - 1)
        self.record_past = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[2]
        past = min(self.num_held, self.window_tokens - 1)
        self.cumulative_length += new
        if self.record_past or new <= self.num_spare:
            # Before too: while the past was recorded, more than W-1 were kept, and were they not
            # dropped now, they might make the buffer grow.
            if not self.record_past:
                self._drop_old()
            self._append(key_states, value_states)
            seen = self._held(past + new)
            if not self.record_past:
                self._drop_old()
            return seen
        # A chunk of a prompt, longer than the spare room. Its tokens see it and what is held, so
        # both are returned, but only its end is kept: the buffer need not hold the chunk.
        keys, values = key_states, value_states
        if past:
            keys, values = (torch.cat(x, 2) for x in zip(self._held(), (keys, values), strict=True))
        keep = slice(max(keys.shape[2] - (self.window_tokens - 1), 0), None)
        # A copy: a view would keep the whole chunk alive.
        self._hold(keys[:, :, keep].clone(), values[:, :, keep].clone())
        return keys, values

    def with_sink(self) -> Pair | None:
        """After the update by a single token: the window with one more entry before it, which is
        the sink's; None if the sink is not seen yet, or the entry may be needed again."""
        assert self._buffers is not None
        begin = self._stop - self.window_tokens - 1
        is_seen = self.has_sink and self.cumulative_length > self.window_tokens
        if not is_seen or begin < 0 or self.record_past or self._buffers[0].requires_grad:
            return None
        return self._held(self.window_tokens + 1)

    def sink_place(self) -> Pair | Tensor:
        """Before the window, after `with_sink`."""
        assert self._buffers is not None
        begin = self._stop - self.window_tokens - 1
        if self._both is not None and not torch.compiler.is_compiling():
            return self._both.select(2, begin)
        k, v = self._buffers
        return k.select(2, begin), v.select(2, begin)

    def crop(self, tokens_to_remove: int) -> None:
        remove = min(_tokens_to_remove(tokens_to_remove), self.cumulative_length)
        left = self.cumulative_length - remove
        needed = min(left, self.window_tokens - 1)
        if self.num_held - remove < needed:
            raise UserError(
                f"cannot remove {remove} tokens: of the {self.num_held} positions in the rolling "
                f"cache, a window of {self.window_tokens} must keep {needed}. Call "
                "activate_past_recording() on the cache before you add the tokens."
            )
        self._stop -= remove
        self.cumulative_length = left
        self._drop_old()
        self._shrink()

    def _most_room(self, num_tokens: int) -> int:
        room = super()._most_room(num_tokens)
        return room if self.record_past else min(room, self.window_tokens - 1 + self.num_spare)

    def _move(self, room: int, new: int = 0, start: int = 0) -> None:
        start = int(self.has_sink and self.num_held + new < room)  # the sink's place
        super()._move(room, new, start)

    def _drop_old(self) -> None:
        self._start = max(self._start, self._stop - (self.window_tokens - 1))


class FirstLayer(GrowingLayer):
    """The first N tokens of each text, which groups with a window keep as a sink. Nothing is ever
    removed: what a crop takes back is written again before a query can see it."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens

    def reset(self) -> None:
        super().reset()
        self._forget_starts()

    def _forget_starts(self) -> None:
        self.starts_B: Tensor | None = None  # where the text of each row begins; None: at 0
        self.last_start = 0  # the last of them
        # Every row has begun: no mask is read any more, for which a GPU would wait at each step.
        self.knows_starts = False

    def keep(self, k_BGTD: Tensor, v_BGTD: Tensor, first_query: int | Tensor) -> Pair:
        """The first tokens of each row's text, of which the new ones may be some: a text begins
        behind its padding, and its first N tokens may come one by one or in several chunks."""
        if not self.is_initialized:
            self.lazy_initialization(k_BGTD, v_BGTD)
            shape = (*k_BGTD.shape[:2], self.num_tokens, k_BGTD.shape[3])
            self._hold(k_BGTD.new_zeros(shape), v_BGTD.new_zeros(shape))
            if not torch.compiler.is_compiling():
                for buffer in self._buffers or ():  # compiled steps write into them
                    torch._dynamo.mark_static_address(buffer)
        held = self._held()
        is_known = self.knows_starts or self.starts_B is None
        if (
            (is_known and isinstance(first_query, int))
            # Every row has its first tokens. (Compiled steps do not come here, so that one graph
            # serves texts that begin anywhere.)
            and first_query >= self.last_start + self.num_tokens
        ):
            return held
        # Place n holds the text's token n, which stands at column starts_B + n of the whole row,
        # so at this column of the new tokens: outside of 0 to T - 1 it is not among them, and the
        # place stays as it was. Each place is computed alike, so that a compiled graph has no
        # number that changes.
        from_BN = torch.arange(self.num_tokens, device=k_BGTD.device)[None] - first_query
        if self.starts_B is not None:
            # Of all layers, and layers may be on several devices.
            from_BN = from_BN + self.starts_B.to(from_BN.device)[:, None]
        is_new_BGND = ((from_BN >= 0) & (from_BN < k_BGTD.shape[2]))[:, None, :, None]
        index_BGND = from_BN.clamp(0, k_BGTD.shape[2] - 1)[:, None, :, None].expand_as(held[0])
        k, v = (
            torch.where(is_new_BGND, x.gather(2, index_BGND), old)
            for x, old in zip((k_BGTD, v_BGTD), held, strict=True)
        )
        if torch.is_grad_enabled() or _is_frozen(held[0]):
            self._hold(k, v)
        else:  # in their place, as compiled steps need it
            held[0].copy_(k)
            held[1].copy_(v)
        return self._held()

    def crop(self, tokens_to_remove: int) -> None:
        self._forget_starts()  # another text may follow, with other padding

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_rows(change)
        if self.starts_B is not None:
            self.starts_B = change(self.starts_B)


def _is_frozen(x: Tensor) -> bool:
    if torch.compiler.is_compiling():  # tracing cannot ask
        return False
    return x.is_inference() and not torch.is_inference_mode_enabled()


def _tokens_to_remove(tokens_to_remove: int) -> int:
    if tokens_to_remove > 0:
        raise UserError(
            f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative number."
        )
    return -int(tokens_to_remove)  # transformers 5.17 passes a tensor


def _of_each_part(name: str) -> Callable[..., None]:
    """A method of `HybridLayer` that calls the same method of each of its parts."""

    def method(self: HybridLayer, *args: object) -> None:
        for part in self.all_parts:
            getattr(part, name)(*args)

    return method


class HybridLayer(CacheLayerMixin):
    """A cache layer for the first `num_full` KV heads (`full`) and one for the others (`window`).
    One of them may be None.

    For transformers this is a layer with all positions: masks span all of them, and the attention
    function picks the columns it needs.
    """

    is_sliding = False

    def __init__(
        self,
        full: CacheLayerMixin | None,
        window: RollingLayer | RingLayer | None,
        num_full: int,
        max_tokens: int,  # -1: no maximum
        num_first: int = 0,
        clock: Clock | None = None,  # of a static cache,
        number: int = 0,  # of whose layers this is the n-th
    ) -> None:
        # No super().__init__(): it would assign attributes that the parts have.
        self.full, self.window, self.num_full = full, window, num_full
        self.clock, self.number = clock, number
        self.first = FirstLayer(num_first) if window is not None and num_first else None
        self.max_tokens = max_tokens
        # In the order of their heads, for `_cut`.
        self.parts: list[Any] = [part for part in (full, window) if part is not None]
        # The window is asked first: it may refuse a crop, and then the others must be as they were.
        others = [part for part in (full, self.first) if part is not None]
        self.all_parts: list[Any] = others if window is None else [window, *others]
        self.is_compileable = all(part.is_compileable for part in self.parts)
        self.is_croppable = all(part.is_croppable for part in self.parts)

    @property
    def keys(self) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return tuple(part.keys for part in self.parts)

    @property
    def values(self) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return tuple(part.values for part in self.parts)

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return all(part.is_initialized for part in self.parts)

    @property
    def batch_size(self) -> int:
        size: int = self.parts[0].batch_size  # only static layers have one, as in transformers
        return size

    @property
    def record_past(self) -> bool:
        """Whether the window keeps what leaves it. transformers switches it off by assigning."""
        return getattr(self.window, "record_past", False)

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if isinstance(self.window, RollingLayer):
            self.window.record_past = value
            if not value:
                self.window.crop(0)  # drops what was recorded

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        cuts = zip(self.parts, self._cut(key_states), self._cut(value_states), strict=True)
        for part, k_BGTD, v_BGTD in cuts:
            part.lazy_initialization(k_BGTD, v_BGTD)
        if self.clock is not None:
            self.clock.move_to(key_states.device)

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Split, Split]:
        if self.clock is not None:
            split = self._update_slots(self.clock, key_states, value_states)
            return split, split
        first_query = self.get_seq_length()
        k, v = self._cut(key_states), self._cut(value_states)
        first = full = window = with_sink = place = None
        if self.first is not None:
            first = self.first.keep(k[-1], v[-1], first_query)
        if self.full is not None:
            full = self.full.update(k[0], v[0], *args, **kwargs)
        if isinstance(self.window, RollingLayer):
            window = self.window.update(k[-1], v[-1], *args, **kwargs)
            if key_states.shape[2] == 1 and (with_sink := self.window.with_sink()) is not None:
                window, place = with_sink, self.window.sink_place()
        split = Split(
            full, window, first_query, first,
            has_sink_entry=with_sink is not None, sink_place=place,
        )  # fmt: skip
        return split, split

    def _update_slots(self, clock: Clock, key_states: Tensor, value_states: Tensor) -> Split:
        is_first, num_new = not self.is_initialized, key_states.shape[2]
        if is_first:
            self.lazy_initialization(key_states, value_states)
        step = clock.step_of(self.number, num_new, key_states.device)
        k, v = self._cut(key_states), self._cut(value_states)
        first_query = 0 if is_first else step.first
        first = full = window = place = None
        if self.first is not None:
            first = self.first.keep(k[-1], v[-1], first_query)
        if isinstance(self.full, SlotLayer):
            self.full.write(step, k[0], v[0])
            full = self.full.pair
        has_sink = False
        if isinstance(ring := self.window, RingLayer):
            # What several new tokens see is read before the last of them overwrites it.
            window = (k[-1], v[-1]) if is_first else ring.read(step, k[-1], v[-1])
            ring.write(step, k[-1], v[-1])
            place, has_sink = ring.empty_sink_place(), ring.has_sink
        is_decoding = num_new == 1 and not is_first
        return Split(
            full, window, first_query, first, step=step if is_decoding else None,
            has_sink_entry=is_decoding and has_sink, sink_place=place,
        )  # fmt: skip

    def fill(self, held: HybridLayer) -> None:
        """A layer of an empty static cache with what this one of a dynamic cache holds."""
        assert self.clock is not None
        num_tokens = held.get_seq_length()
        for part, of_part in zip(self.parts, held.parts, strict=True):
            part.fill(of_part.keys, of_part.values, num_tokens)
        self.clock.move_to(self.parts[0].device)
        self.clock.length.fill_(num_tokens)

    def get_seq_length(self) -> int:
        if self.clock is None:
            length: int = self.parts[0].get_seq_length()
            return length
        # A tensor, as static layers of transformers say it; 0 as long as no token was seen.
        return self.clock.length if self.is_initialized else 0  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.is_compileable:
            return self.max_tokens, 0
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.max_tokens

    def activate_past_recording(self) -> None:
        self.record_past = True

    offload = _of_each_part("offload")
    prefetch = _of_each_part("prefetch")
    _reset_parts = _of_each_part("reset")
    _crop_parts = _of_each_part("crop")
    reorder_cache = _of_each_part("reorder_cache")
    batch_repeat_interleave = _of_each_part("batch_repeat_interleave")
    batch_select_indices = _of_each_part("batch_select_indices")

    def reset(self) -> None:
        self._reset_parts()
        if self.clock is not None:
            self.clock.length.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        if self.clock is None:
            self._crop_parts(tokens_to_remove)
            return
        remove = _tokens_to_remove(tokens_to_remove)
        if isinstance(self.window, RingLayer):
            self.window.check_crop(int(self.clock.length), remove)
        self._crop_parts(tokens_to_remove)
        # By the last layer: if one refuses, the cache is as it was.
        if self.number == self.clock.num_layers - 1:
            self.clock.length.sub_(remove)

    def _cut(self, x_BGTD: Tensor) -> tuple[Tensor, ...]:
        if len(self.parts) == 1:
            return (x_BGTD,)
        return x_BGTD[:, : self.num_full], x_BGTD[:, self.num_full :]


def hybridize_cache(
    cache: Cache, config: PretrainedConfig, sink: Sink, attention_mask: Any = None
) -> Cache:
    """Replace the layers of an empty cache, in place. `sink`: the hybrid's. `attention_mask`: of
    the next call, which shows where padding ends.

    A cache that is already hybrid is left alone. So is a plain dynamic one with tokens in it: it
    has all positions, so results are right, but no memory is saved.
    """
    window_tokens, num_groups = config.bosch["window"], config.num_key_value_heads
    layers: list[Any] = cache.layers
    owns = [own_window(config, layer) for layer in range(config.num_hidden_layers)]
    if layers and isinstance(layers[0], HybridLayer):
        for layer, own in zip(layers, owns, strict=True):
            if own is None and layer.window is not None:
                held = layer.window.window_tokens
                if held != window_tokens:
                    problem = f"this cache was made for a window of {held} tokens"
                    raise UserError(f"{problem}; it is {window_tokens} now. Start a new cache.")
    elif int(cache.get_seq_length()) == 0:
        # A DynamicCache() without a config makes its layers later.
        if not layers and cache.layer_class_to_replicate is not None:
            layers = [cache.layer_class_to_replicate() for _ in config.bosch["num_full"]]
        clock = Clock(len(layers)) if isinstance(layers[0], StaticLayer) else None
        # A static layer with a window of its own says no more than that.
        size = max((getattr(layer, "max_cache_len", -1) for layer in layers), default=-1)
        cache.layers = [
            _hybrid_layer(
                layer,
                num_full,
                window_tokens=(own or window_tokens) if num_full < num_groups else None,
                sink=sink if own is None else NO_SINK,
                clock=clock,
                number=number,
                size=size,
            )
            for number, (layer, num_full, own) in enumerate(
                zip(layers, config.bosch["num_full"], owns, strict=True)
            )
        ]
    elif cache.is_compileable:
        problem = f"this static cache already has {int(cache.get_seq_length())} tokens"
        raise UserError(f"{problem}; pass the hybrid an empty one, or use a DynamicCache.")
    firsts: list[FirstLayer] = []
    for layer in cache.layers:
        # Compiled models come here too, and cannot trace an assignment within a comprehension.
        if (first := getattr(layer, "first", None)) is not None:
            firsts.append(first)
    if isinstance(attention_mask, dict):  # of static caches: one for each type of layer
        attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values())))
    hides = attention_mask is not None and not hides_nothing(attention_mask)
    if hides and firsts and not firsts[0].knows_starts:
        starts = _text_starts(attention_mask)
        for first in firsts:
            first.starts_B, first.last_start, first.knows_starts = starts
    return cache


def _text_starts(attention_mask: Tensor) -> tuple[Tensor | None, int, bool]:
    """Where the text of each row begins (None: all at 0), the last of these places, and whether all
    rows have begun, which a graph that is being compiled cannot know."""
    seen_BS = attention_mask.bool()  # (B, S), or (B, 1, T, S)
    if seen_BS.dim() == 4:
        seen_BS = seen_BS[:, 0].any(1)
    starts_B = seen_BS.int().argmax(1)
    if torch.compiler.is_compiling() or not seen_BS.any(1).all():
        return starts_B, 0, False
    last_start = int(starts_B.max())
    return (starts_B if last_start else None), last_start, True


def _hybrid_layer(
    layer: Any,
    num_full: int,
    window_tokens: int | None,
    sink: Sink,
    clock: Clock | None,
    number: int,
    size: int,
) -> HybridLayer:
    """In place of a plain layer. `window_tokens`: None if it has no groups with a window. `size`:
    of a static cache."""
    window: RollingLayer | RingLayer | None = None
    has_sink, num_first = sink.kind == "static", sink.num_tokens
    if clock is None:
        full = GrowingLayer() if type(layer) is DynamicLayer else layer  # quantized stays quantized
        if window_tokens is not None:
            window = RollingLayer(window_tokens, has_sink)
        return HybridLayer(
            full if num_full else None, window, num_full, max_tokens=-1, num_first=num_first
        )
    if window_tokens is not None:
        window = RingLayer(window_tokens, max_cache_len=size, has_sink=has_sink)
    full = SlotLayer(max_cache_len=size) if num_full else None
    hybrid = HybridLayer(full, window, num_full, size, num_first, clock, number)
    if layer.is_initialized and layer.keys is not None:
        # generate(cache_implementation="static", prefill_chunk_size=...) has allocated all groups
        # in one layer; allocate those of each part.
        sample = layer.keys[:, :, :0]
        hybrid.lazy_initialization(sample, sample)
    return hybrid


def kv_bytes(cache: Cache) -> int:
    """Bytes of the keys and values in use, without the spare room of dynamic layers. What the
    cache takes in memory is `allocated_bytes`."""
    return sum(x.nbytes for layer in cache.layers for x in held_tensors(layer))


def allocated_bytes(cache: Cache) -> int:
    """Bytes that the cache keeps from other uses, with the spare room, sinks and whatever else its
    tensors' storages hold. Of any cache of transformers."""
    storages = {x.untyped_storage() for x in _alive_tensors(cache)}
    return sum(storage.nbytes() for storage in storages)


def _alive_tensors(thing: Any) -> Iterator[Tensor]:
    """In a cache, its layers, their parts and attributes."""
    if hasattr(thing, "__tensor_flatten__"):  # a quantized tensor of several
        names, _ = thing.__tensor_flatten__()
        yield from (x for name in names for x in _alive_tensors(getattr(thing, name)))
    elif isinstance(thing, Tensor):
        if thing.dim() > 1:  # others are counters
            yield thing
    elif isinstance(thing, Cache) or hasattr(thing, "lazy_initialization"):  # or its layer
        yield from _alive_tensors(list(vars(thing).values()))
    elif isinstance(thing, list | tuple):
        yield from (x for part in thing for x in _alive_tensors(part))


def held_tensors(layer: Any) -> list[Tensor]:
    """Keys and values of a layer: a pair for each part that has any."""
    parts = layer.all_parts if isinstance(layer, HybridLayer) else [layer]
    if any(hasattr(part, "_quantized_keys") for part in parts):
        problem = "the size of a quantized cache is not known"
        raise UserError(f"{problem}; count the bytes of a cache that is not quantized.")
    return [x for part in parts for x in (part.keys, part.values) if x is not None and x.dim() == 4]
