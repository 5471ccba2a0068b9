"""The layers of a static cache: buffers of a fixed size, in which all positions are tensors. So a
step of decoding is the same operations for every token, and one graph: compiled, or captured on a
GPU, once for all of them.

    full groups      SlotLayer    a slot for each position
    window groups    RingLayer    W slots: position p is in slot p % W, so a new token is one small
                                  write, which takes the place of the token that leaves the window;
                                  and behind them one for a static sink, written once

With W = 4, after the positions 0 to 5:

    slot         0 1 2 3   4        Slots are out of order, and attention does not mind. What a new
    position     4 5 2 3   sink     token sees are the first slots of both kinds: up to its own
                                    position as long as the text is within the window, then all.
"""
# B batch, G kv heads, T new tokens, L entries of the window part, D head size

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from bosch.run.errors import UserError

Pair = tuple[Tensor, Tensor]  # keys and values


class Step:
    """Of one forward call: where its new tokens stand. All layers share it, and what is computed
    for one of them serves the others (`memo`)."""

    def __init__(self, first: Tensor, num_new: int) -> None:
        self.first, self.num_new = first, num_new  # position of the first, a 0-dim tensor
        self.positions_T = first[None]
        if num_new > 1:
            self.positions_T = first + torch.arange(num_new, device=first.device)
        self.memo: dict[tuple[object, ...], Tensor] = {}


class Clock:
    """How many tokens a static cache has seen. One for all layers: the first one moves it on."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.length = torch.tensor(0)
        self._step: Step | None = None

    def move_to(self, device: torch.device) -> None:
        if self.length.device.type == "cpu":  # the first layer decides
            self.length = self.length.to(device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.length)  # as transformers does with its own

    def step_of(self, layer: int, num_new: int, device: torch.device) -> Step:
        """The layers ask in their order, each once in a forward call."""
        if layer == 0:
            self._step = Step(self.length.clone(), num_new)
            self.length.add_(num_new)
        step = self._step
        assert step is not None, "layer 0 asks first"
        if step.first.device != device:  # layers may be on several GPUs
            self._step = step = Step(step.first.to(device), num_new)
        if layer == self.num_layers - 1:
            self._step = None  # else its tensors would be outputs of a compiled step
        return step


class SlotLayer(StaticLayer):
    """A slot for each position. Its tensors never move: a captured graph writes into them."""

    def __init__(self, max_cache_len: int) -> None:
        self.num_slots = max_cache_len  # of positions
        super().__init__(max_cache_len=max_cache_len)

    @property
    def pair(self) -> Pair:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def slots(self, step: Step) -> Tensor:
        return step.positions_T

    def fill(self, k_BGSD: Tensor, v_BGSD: Tensor, num_tokens: int) -> None:
        """With what a dynamic layer holds of a text of so many tokens: its last ones."""
        self.lazy_initialization(k_BGSD, v_BGSD)
        count = min(k_BGSD.shape[2], self.num_slots)
        positions = torch.arange(num_tokens - count, num_tokens, device=self.device)
        for held, x_BGSD in zip(self.pair, (k_BGSD, v_BGSD), strict=True):
            last = x_BGSD[:, :, x_BGSD.shape[2] - count :]
            held.index_copy_(2, positions % self.num_slots, last)

    def write(self, step: Step, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        slots_T = self.slots(step)
        count = slots_T.shape[0]
        for held, x_BGTD in zip(self.pair, (k_BGTD, v_BGTD), strict=True):
            held.index_copy_(2, slots_T, x_BGTD[:, :, -count:])

    def crop(self, tokens_to_remove: int) -> None:
        pass  # the clock is set back, and the slots are written again before they are seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            for held in self.pair:
                held.copy_(held.index_select(0, beam_idx.to(held.device)))


class RingLayer(SlotLayer):
    """W slots. W and not W - 1: the new token is written before it is read, and sees itself."""

    is_croppable = False  # a rejected token has overwritten what the window still needs

    def __init__(self, window_tokens: int, max_cache_len: int, has_sink: bool = False) -> None:
        self.window_tokens = window_tokens
        self.has_sink = has_sink  # a static one
        # It has a place only if texts can be longer than the window.
        self._has_empty_place = self._has_place = has_sink and max_cache_len > window_tokens
        num_slots = min(window_tokens, max_cache_len)
        super().__init__(max_cache_len=num_slots + self._has_place)
        self.num_slots = num_slots

    def slots(self, step: Step) -> Tensor:
        key = ("ring", self.num_slots)
        if key not in step.memo:
            # Of two tokens for one slot, index_copy_ may keep either: so only the last ones.
            step.memo[key] = step.positions_T[-self.num_slots :] % self.num_slots
        return step.memo[key]

    def read(self, step: Step, k_BGTD: Tensor, v_BGTD: Tensor) -> Pair:
        """What new tokens can see, before they are written: of one token the ring itself; of
        several the W - 1 positions before them, in order, and themselves. (Those before the text's
        beginning are whatever the slots hold, and the caller hides them.)"""
        if step.num_new == 1:
            return self.pair
        past = torch.arange(1 - self.num_slots, 0, device=self.device)
        slots_L = (step.first + past) % self.num_slots
        pairs = zip(self.pair, (k_BGTD, v_BGTD), strict=True)
        k, v = (torch.cat([held.index_select(2, slots_L), x], 2) for held, x in pairs)
        return k, v

    def check_crop(self, num_tokens: int, remove: int) -> None:
        """Refuse to remove so many of a text's tokens if what the window will need was overwritten:
        all that is W positions before the text's end or more."""
        left = num_tokens - remove
        first_needed = max(0, left - self.num_slots + 1)  # by the next token, beside itself
        if first_needed < min(left, num_tokens - self.num_slots):
            raise UserError(
                f"a static cache cannot remove {remove} tokens: the window of {self.num_slots} has "
                "no longer what was before them. Use a DynamicCache, and call "
                "activate_past_recording() on it before you add the tokens."
            )

    def empty_sink_place(self) -> Pair | None:
        """Where the sink's constants have to be written, if they were not yet."""
        if not self._has_empty_place or not self.is_initialized:
            return None
        self._has_empty_place = False
        k_BGLD, v_BGLD = self.pair
        return k_BGLD[:, :, -1], v_BGLD[:, :, -1]

    def reset(self) -> None:
        super().reset()
        self._has_empty_place = self._has_place


def num_seen(step: Step, num_slots: int) -> Tensor:
    """How many of the first slots the only new token sees, a 0-dim tensor. Of a ring: those of its
    window, and all, which includes a static sink, once a token has left it."""
    key = ("seen", num_slots)
    if key not in step.memo:
        step.memo[key] = (step.first + 1).clamp_max(num_slots)
    return step.memo[key]


def visible_slots(
    step: Step, mask_BNTS: Tensor | None, num_slots: int, window_tokens: int | None = None
) -> Tensor:
    """(B, 1, 1, slots): what the only new token sees. `mask_BNTS`: of a padded text. With
    `window_tokens` the slots are those of a ring."""
    if mask_BNTS is not None and window_tokens is None:
        return mask_BNTS
    kind = "visible" if mask_BNTS is None else "visible of a padded text"
    key = (kind, num_slots, window_tokens)
    if key in step.memo:
        return step.memo[key]
    if mask_BNTS is None:
        # Up to its own position. Of a ring that is all, the sink too, once a token has left it.
        slots_L = torch.arange(num_slots, device=step.first.device)
        visible = (slots_L <= step.first)[None, None, None]
    else:
        assert window_tokens is not None
        # Slot s holds the newest position that is s modulo their number, which is (first - s) % W
        # tokens old. A negative one has not been written.
        in_ring = min(window_tokens, num_slots)
        slots_L = torch.arange(in_ring, device=step.first.device)
        positions_L = step.first - (step.first - slots_L) % in_ring
        visible = mask_BNTS.index_select(-1, positions_L.clamp_min(0)) & (positions_L >= 0)
        if num_slots > in_ring:  # a static sink
            visible = torch.cat([visible, sees_sink(mask_BNTS, step.first, window_tokens)], -1)
    step.memo[key] = visible
    return visible


def sees_sink(mask_BNTS: Tensor, first_query: int | Tensor, window_tokens: int) -> Tensor:
    """(B, N, T, 1): whether something of its text has left a query's window."""
    behind_TS = is_behind_window(mask_BNTS, first_query, window_tokens)
    return (mask_BNTS & behind_TS).any(-1, keepdim=True)


def is_behind_window(mask_BNTS: Tensor, first_query: int | Tensor, window_tokens: int) -> Tensor:
    """(T, S): whether a query at its column has left a key behind. Windows are counted in columns,
    of which padding may take some, also in a text: between two turns of a batch of chats."""
    num_queries, num_keys = mask_BNTS.shape[-2:]
    columns_S = torch.arange(num_keys, device=mask_BNTS.device)
    queries_T = torch.arange(num_queries, device=mask_BNTS.device) + first_query
    return columns_S <= queries_T[:, None] - window_tokens
