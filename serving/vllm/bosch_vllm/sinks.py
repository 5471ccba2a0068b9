"""Static sinks: a constant key and value of each windowed group, seen by tokens that the window has
left behind (bosch/hybrid/sinks.py).

To merge attention with one more key one needs the log-sum-exp of its scores, which vLLM's attention
does not give. But it takes a number c for each head that counts as a score with value zero, and so
only makes the output smaller: by the factor x = 1 / (1 + exp(c - lse)). Attention is computed twice
from the same cache, without c and with it; x is the ratio of the two, and lse follows. c is the
sink's own highest score in the batch, so that no rounding of x is enlarged.
"""
# N tokens, H query heads, G kv heads with a window, D head size

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention

KEY, VALUE = "window_sink_key", "window_sink_value"  # their names in the folder of a hybrid
TWIN = "_damped"  # ends the name of the second module
NO_SCORE = -1e30  # of a number that makes nothing smaller
LEAST = 1e-30


class WindowWithSink(nn.Module):
    """In place of an Attention over some groups with a window. `groups`: their sinks' places in the
    parameters of `owner`, the layer's attention module."""

    def __init__(self, owner: Any, groups: slice, settings: dict[str, Any], padded: int):
        super().__init__()
        self.padded, self.scale = padded, settings["scale"]
        self._owner = [owner]  # in a list, so that it is no child
        self.groups = groups
        numbers = torch.full((settings["num_heads"],), NO_SCORE, dtype=torch.float32)
        # Both with numbers, though they do nothing here: one backend must serve both.
        self.plain = Attention(**settings, sinks=numbers)
        self.register_buffer("numbers_H", numbers.clone(), persistent=False)
        twin = {**settings, "prefix": settings["prefix"] + TWIN}
        self.damped = Attention(
            **twin, sinks=self.numbers_H, kv_sharing_target_layer_name=settings["prefix"]
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        (owner,) = self._owner
        key_GD, value_GD = (getattr(owner, name)[self.groups] for name in (KEY, VALUE))
        repeats = len(self.numbers_H) // len(key_GD)
        key_HD, value_HD = (x.repeat_interleave(repeats, 0).float() for x in (key_GD, value_GD))
        size = key_HD.shape[-1]
        query_NHD = query.unflatten(-1, (-1, self.padded))
        score_NH = (query_NHD[..., :size].float() * key_HD).sum(-1) * self.scale
        self.numbers_H.copy_(score_NH.amax(0))

        plain_NHD, damped_NHD = (
            part(query, key, value).unflatten(-1, (-1, self.padded)).float()
            for part in (self.plain, self.damped)
        )
        x_NH = (damped_NHD * plain_NHD).sum(-1) / plain_NHD.square().sum(-1).clamp_min(LEAST)
        x_NH = x_NH.clamp(LEAST, 1)
        # exp(sink's score - lse)
        odds_NH = (1 - x_NH) / x_NH * torch.exp(score_NH - self.numbers_H)
        share_NH = odds_NH / (1 + odds_NH)
        has_left_N = owner.bosch_positions >= self.plain.sliding_window
        share_NH = torch.where(has_left_N[:, None], share_NH, 0)
        value_HD = nn.functional.pad(value_HD, (0, self.padded - size))
        out_NHD = torch.lerp(plain_NHD, value_HD.expand_as(plain_NHD), share_NH[..., None])
        return out_NHD.to(query.dtype).flatten(-2)


def add_parameters(owner: Any, num_windowed: int, head_size: int) -> None:
    """Loaded from the folder with the layer's other weights."""
    for name in (KEY, VALUE):
        empty = torch.empty(num_windowed, head_size)
        owner.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def keep_positions(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        module.bosch_positions = named["positions"]

    owner.register_forward_pre_hook(keep_positions, with_kwargs=True)
