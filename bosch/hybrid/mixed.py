"""Attention between full and windowed, for masks that are learned: of each group

    z * full + (1 - z) * window

before the output projection, both from the same queries, keys and values. A stock model loaded with
`attn_implementation="bosch"` computes it when it is called as

    model(ids, use_cache=False, bosch_gates=z, bosch_window=W)

with z a tensor (layers, groups) of numbers from 0 to 1, and autograd goes through to z. A group
whose gate is 0 or 1, and needs no gradient, needs only one of its branches: `bosch_mask` beside the
gates says 1 (full), 0 (window) or None (both) for each group.
"""
# B batch, H query heads, G kv heads, T queries, D head size, M mixed groups, R query heads a group

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bosch.backends._interface import AttentionCall
from bosch.hybrid.dispatch import attend
from bosch.hybrid.groups import original_order, pick


def mixed_attention(
    call: AttentionCall,
    gates_G: Tensor,
    row: list[int | None],
    window_tokens: int,
    backend: str | None,
) -> Tensor:
    """The output of a layer, (B, T, H, D). `row`: what each group computes, as in bosch_mask."""
    only_full, both, only_window = (
        [group for group, bit in enumerate(row) if bit == kind] for kind in (1, None, 0)
    )
    groups_BTGRD: list[Tensor] = []
    full_BTGRD = window_BTGRD = call.q_BHTD.new_empty(0)
    if only_full or both:
        full_BTGRD = _output(call, only_full + both, None, backend)
    if both or only_window:
        window_BTGRD = _output(call, both + only_window, window_tokens, backend)
    if only_full:
        groups_BTGRD.append(full_BTGRD[:, :, : len(only_full)])
    if both:
        z_M11 = gates_G[both].to(full_BTGRD.dtype)[:, None, None]
        # Exact at both ends: lerp(a, b, 0) is a and lerp(a, b, 1) is b.
        groups_BTGRD.append(
            torch.lerp(window_BTGRD[:, :, : len(both)], full_BTGRD[:, :, len(only_full) :], z_M11)
        )
    if only_window:
        groups_BTGRD.append(window_BTGRD[:, :, len(both) :])
    out_BTGRD = groups_BTGRD[0] if len(groups_BTGRD) == 1 else torch.cat(groups_BTGRD, dim=2)
    return original_order(out_BTGRD.flatten(2, 3), only_full + both + only_window)


def _output(
    call: AttentionCall, groups: list[int], window_tokens: int | None, backend: str | None
) -> Tensor:
    """(B, T, G, R, D) of some groups, all full or all windowed."""
    out_BHTD = attend(replace(pick(call, groups), window_tokens=window_tokens), backend)
    return out_BHTD.transpose(1, 2).unflatten(2, (len(groups), -1))


def check_gates(bosch_gates: Any, num_layers: int, num_groups: int) -> None:
    shape = (num_layers, num_groups)
    if not isinstance(bosch_gates, Tensor) or tuple(bosch_gates.shape) != shape:
        found = tuple(getattr(bosch_gates, "shape", ())) or type(bosch_gates).__name__
        raise ValueError(
            f"bosch_gates is {found}; it must be a tensor of {num_layers} layers x {num_groups} KV "
            "heads, with numbers from 0 (window) to 1 (full attention)."
        )
    if not bosch_gates.is_floating_point():
        raise ValueError(
            f"bosch_gates are of {bosch_gates.dtype}; gates are real numbers. For whole ones there "
            "is bosch_mask."
        )
