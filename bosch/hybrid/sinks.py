"""Static sinks: the constant key and value that each group with a window sees in the place of the
first token of the text, once that has left its window.

    sinks = measure_sinks(model, texts)      # of a dense model (bosch/hybrid/sink_files.py)
    attach_sinks(model, sinks)               # search mode: every bosch_mask has them now
    deploy(model, z, W, sinks)               # parameters of the hybrid

In a hybrid they are two parameters of each attention module that has groups with a window,
`window_sink_key` and `window_sink_value`, (groups, D) each. They take no KV cache.
"""
# B batch, L layers, G kv heads, T queries, N texts, D head size

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bosch.backends._interface import Documents, Sink
from bosch.masks.window import SINK_KINDS
from bosch.run.errors import UserError

KEY, VALUE = "window_sink_key", "window_sink_value"
ATTACHED = "search_sink"  # attribute of a dense model's attention modules


class Sinks(NamedTuple):
    """Of all groups of a dense model."""

    keys_LGD: Tensor
    values_LGD: Tensor

    def of_groups(self, layer: int, groups: Sequence[int]) -> dict[str, Tensor]:
        """The parameters of a layer whose groups with a window are these."""
        return {
            KEY: self.keys_LGD[layer, list(groups)].clone(),
            VALUE: self.values_LGD[layer, list(groups)].clone(),
        }


def past_window(
    window_tokens: int,
    num_queries: int,
    num_past: int | Tensor,
    mask_BNTS: Tensor | None,
    documents: Documents | None,
    device: torch.device,
) -> Tensor | None:
    """bool, (B or 1, T): which queries no longer see the first token of their text, and so see the
    sink. None if there is none. `mask_BNTS` is that of full attention."""
    if documents is not None:
        return documents.position_BT >= window_tokens
    if mask_BNTS is not None:  # padding, or the empty slots of a static cache
        return mask_BNTS[:, 0].sum(-1) > window_tokens
    if isinstance(num_past, int) and num_past + num_queries <= window_tokens:
        return None
    return (torch.arange(num_queries, device=device) + num_past >= window_tokens)[None]


def attach_sinks(model: Any, sinks: Sinks | None) -> None:
    """From now on every mask that a dense model is called with has these sinks; None: none."""
    for layer, block in enumerate(model.base_model.layers):
        pair = None if sinks is None else (sinks.keys_LGD[layer], sinks.values_LGD[layer])
        setattr(block.self_attn, ATTACHED, pair)


def attached_sink(module: Any, seen_BT: Tensor | None) -> Sink | None:
    """The sink of all groups of a dense model's layer."""
    pair = getattr(module, ATTACHED, None)
    return None if pair is None or seen_BT is None else Sink(pair[0], pair[1], seen_BT)


def add_sinks(model: Any, config: Any) -> None:
    """Give a hybrid the parameters that its config asks for."""
    if kind_of(config) != "static":
        return
    hybrid, num_groups = config.bosch, config.num_key_value_heads
    for layer, num_full in zip(model.base_model.layers, hybrid["num_full"], strict=True):
        attention = layer.self_attn
        if num_full < num_groups:
            weight = attention.k_proj.weight
            shape = (num_groups - num_full, weight.shape[0] // num_groups)
            for name in (KEY, VALUE):
                empty = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
                attention.register_parameter(name, nn.Parameter(empty))


def kind_of(config: Any) -> str:
    sink = config.bosch.get("sink", {"kind": "none"})
    kind = sink.get("kind") if isinstance(sink, dict) else sink
    if kind not in SINK_KINDS:
        raise UserError(
            f"config.bosch['sink'] is {sink!r}; this version knows the kinds "
            f"{', '.join(SINK_KINDS)}."
        )
    return str(kind)


def is_sink(name: str) -> bool:
    """Whether a parameter of this name is one of ours."""
    return name.rpartition(".")[2] in (KEY, VALUE)


def sink_of(module: Any, seen_BT: Tensor | None) -> Sink | None:
    """The sink of a hybrid's layer."""
    key_GD = getattr(module, KEY, None)
    if key_GD is None or seen_BT is None:
        return None
    return Sink(key_GD, getattr(module, VALUE), seen_BT)
