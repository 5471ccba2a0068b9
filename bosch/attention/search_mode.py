"""SEARCH mode: a stock model, with a mask of groups as an argument of its forward call.

    model(ids, use_cache=False, bosch_mask=z, bosch_window=W)

computes group g of layer l with full attention if `z[l][g]` is 1, and with a window of W tokens if
it is 0. Nothing is stored, so changing z costs nothing. Without a mask the model is the dense one.

To learn a mask, pass `bosch_gates=z`, a tensor (layers, groups) of numbers from 0 to 1. Each group
then computes z * full + (1 - z) * window before the output projection, and z gets gradients. A
group whose gate is 0 or 1 and needs no gradient needs only one of the two: pass `bosch_mask` as
well, with 1 (full), 0 (window) or None (both) for each group.
"""
# B batch, H query heads, G kv heads, R query heads a group, T queries, S keys, D head size, M mixed
# groups

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bosch.attention.call import AttentionCall
from bosch.attention.sink_keys import sink_keys
from bosch.masks.window import check_window, full_layers
from bosch.run.errors import UserError

Mask = Sequence[Sequence[int | None]] | Tensor  # (layers, groups)
MASKED = "bosch_mask_in_use"  # attribute of a model inside `bosch.masked`: its mask


@dataclass(frozen=True)
class Parts:
    """The attention of a layer in at most two calls, and how their outputs make the layer's."""

    calls: list[AttentionCall]  # of the full groups, then of those on the window; none without any
    full: list[int]  # groups that are only full,
    both: list[int]  # in both calls,
    windowed: list[int]  # or only on the window
    gates_G: Tensor | None = None  # the share of the full output in groups that are in both

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """The output of the layer, (B, T, H, D), from those of the calls.

        call of the full groups            full... both...
        call of those on the window                both... windowed...
        their outputs, joined              full... both... windowed...    and put in order
        """
        if len(outputs) == 1:  # all groups are alike, so they are in order
            return outputs[0]
        groups = self.full + self.both + self.windowed
        full_BTGRD = outputs[0].unflatten(2, (len(self.full + self.both), -1))
        window_BTGRD = outputs[1].unflatten(2, (len(self.both + self.windowed), -1))
        full_BTGRD, mixed_BTMRD = full_BTGRD.tensor_split([len(self.full)], dim=2)
        if self.both:
            assert self.gates_G is not None
            z_M11 = self.gates_G[self.both].to(full_BTGRD.dtype)[:, None, None]
            # Exact at both ends: lerp(a, b, 0) is a and lerp(a, b, 1) is b.
            mixed_BTMRD = torch.lerp(window_BTGRD[:, :, : len(self.both)], mixed_BTMRD, z_M11)
        rest_BTGRD = window_BTGRD[:, :, len(self.both) :]
        out_BTGRD = torch.cat([full_BTGRD, mixed_BTMRD, rest_BTGRD], dim=2)
        if groups != sorted(groups):
            # The inverse of a permutation is the order that sorts it: place i of the layer is where
            # `groups` has i.
            out_BTGRD = out_BTGRD[:, :, sorted(range(len(groups)), key=groups.__getitem__)]
        return out_BTGRD.flatten(2, 3)


def search_parts(
    module: Any,
    call: AttentionCall,
    bosch_mask: Mask | None,
    bosch_window: int | None,
    bosch_gates: Tensor | None,
) -> Parts:
    """What computes a layer of a stock model, from the call for all of its groups."""
    has_choice = bosch_mask is not None or bosch_gates is not None
    if has_choice != (bosch_window is not None):
        problem = "bosch_window needs bosch_mask or bosch_gates, and the other way round"
        raise UserError(f"{problem}: pass both, or neither for the dense model.")
    if bosch_window is None:
        return Parts([call], [*range(call.k_BGSD.shape[1])], [], [])
    layers, num_groups = full_layers(module.config), call.k_BGSD.shape[1]
    num_layers, gates_G, layer = len(layers), None, layers.index(module.layer_idx)
    if bosch_gates is not None:
        shape = tuple(getattr(bosch_gates, "shape", ()))
        if shape != (num_layers, num_groups) or not bosch_gates.is_floating_point():
            raise UserError(
                f"bosch_gates has the shape {shape}; it must be a tensor of {num_layers} layers x "
                f"{num_groups} KV heads with floating-point numbers from 0 (window) to 1 (full "
                "attention). For masks of 0 and 1 use bosch_mask."
            )
        gates_G = bosch_gates[layer]
    row: list[int | None] = [None] * num_groups
    if bosch_mask is not None:
        rows: Any = bosch_mask if hasattr(bosch_mask, "__len__") else ()  # a GroupMask has none
        if len(rows) != num_layers:
            problem = f"bosch_mask has {len(rows)} layers of 0 and 1; the model has {num_layers}"
            raise UserError(f"{problem}. Pass z of a GroupMask, or use bosch.masked(model, mask).")
        of_layer = rows[layer]
        row = of_layer.tolist() if hasattr(of_layer, "tolist") else list(of_layer)
        known = (0, 1) if gates_G is None else (0, 1, None)
        if len(row) != num_groups or any(bit not in known for bit in row):
            raise UserError(
                f"bosch_mask[{layer}] is {row}; it needs one entry for each of the {num_groups} KV "
                "heads, 1 for full attention or 0 for the window."
            )
    check_window(bosch_window)
    if row != [1] * num_groups and has_empty_slots(call.q_BHTD, call.k_BGSD, call.mask_BNTS):
        # The positions of the queries, and so their windows, are not known.
        problem = "bosch_mask does not work with a static cache"
        raise UserError(f"{problem}: use a DynamicCache or none, or materialize the model first.")
    num_past = call.k_BGSD.shape[2] - call.q_BHTD.shape[2]
    # Once for all groups, from the whole call: `split_groups` picks those of the windowed ones.
    call = replace(call, sink=sink_keys(module, call, bosch_window, num_past))
    return split_groups(call, gates_G, row, bosch_window)


def split_groups(
    call: AttentionCall, gates_G: Tensor | None, row: list[int | None], window_tokens: int
) -> Parts:
    """One call for the groups that need full attention, and one for those that need the window.
    `row`: what each group computes, as in bosch_mask."""
    full = [group for group, bit in enumerate(row) if bit == 1]
    both = [group for group, bit in enumerate(row) if bit is None]
    windowed = [group for group, bit in enumerate(row) if bit == 0]
    # A mixed group needs both outputs, so it is in both calls. It is last in the one and first in
    # the other, where `Parts.join` finds it.
    calls = []
    if full or both:
        calls.append(replace(_pick(call, full + both), sink=None))
    if both or windowed:
        calls.append(replace(_pick(call, both + windowed), window_tokens=window_tokens))
    return Parts(calls, full, both, windowed, gates_G)


def _pick(call: AttentionCall, groups: list[int]) -> AttentionCall:
    """The call for only these groups; neighbors are views."""
    num_groups, first, last = call.k_BGSD.shape[1], groups[0], groups[-1]
    is_run = groups == list(range(first, last + 1))
    chosen = slice(first, last + 1) if is_run else groups
    sink, mask = call.sink, call.mask_BNTS
    if mask is not None and mask.shape[1] > 1:
        mask = mask.unflatten(1, (num_groups, -1))[:, chosen].flatten(1, 2)
    return replace(
        call,
        q_BHTD=call.q_BHTD.unflatten(1, (num_groups, -1))[:, chosen].flatten(1, 2),
        k_BGSD=call.k_BGSD[:, chosen],
        v_BGSD=call.v_BGSD[:, chosen],
        mask_BNTS=mask,
        sink=None if sink is None else sink.of_groups(chosen),
    )


def has_empty_slots(q_BHTD: Tensor, k_BGSD: Tensor, mask_BNTS: Tensor | None) -> bool:
    """Whether the keys end with empty slots of a static cache."""
    # The last query is the newest token, and sees itself: if it does not see the last key, that one
    # is behind it.
    has_past = k_BGSD.shape[2] > q_BHTD.shape[2]
    return has_past and mask_BNTS is not None and not bool(mask_BNTS[:, :, -1, -1].any())
