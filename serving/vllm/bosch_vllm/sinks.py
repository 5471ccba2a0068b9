"""Static sinks: a constant key and value of each windowed group, seen by tokens that the window has
left behind (bosch/sink.py).

To merge attention with one more key one needs the log-sum-exp of its scores, which vLLM's attention
does not give. But it takes a number for each head that makes the output smaller. Each query head is
there twice, without the number and with it, and the two outputs tell the sink's share
(sink_share.py).
"""
# N tokens, H query heads, G kv heads with a window, R query heads of a kv head, D head size

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library, nn
from vllm.v1.attention.selector import get_attn_backend

from bosch_vllm.packing import number_type
from bosch_vllm.sink_share import NO_SCORE, choose_numbers, sink_share
from bosch_vllm.specs import BlockAttention

KEY, VALUE = "window_sink_key", "window_sink_value"  # their names in the folder of a hybrid


# A compiler does not see that the attention reads the numbers, since it is an operator that takes
# them from its module, and would write them after it. That the queries change too, which is not so,
# keeps the order.
@library.custom_op("bosch_vllm::set_numbers", mutates_args=["numbers", "queries"])
def set_numbers(numbers: Tensor, chosen_GR: Tensor, queries: Tensor) -> None:
    numbers.view(len(chosen_GR), 2, -1)[:, 1] = chosen_GR  # rounds them


class WindowWithSink(nn.Module):
    """In place of an Attention over some groups with a window. `groups`: their sinks' places in the
    parameters of `owner`, the layer's attention module."""

    def __init__(
        self,
        owner: Any,
        make_attention: Callable[..., BlockAttention],  # all but its query heads are given
        groups: slice,
        repeats: int,  # query heads of a group
        padded: int,
        cache_dtype: Any,
        like_gpus: bool,
    ):
        super().__init__()
        self.padded, self.scale = padded, owner.attn.impl.scale
        self._owner = [owner]  # in a list, so that it is no child
        self.groups = groups
        num_groups = groups.stop - groups.start
        self.twice = num_groups, 2, repeats
        num_heads = 2 * num_groups * repeats
        backend = get_attn_backend(
            padded,
            torch.get_default_dtype(),
            cache_dtype,
            has_sink=True,
            has_sliding_window=True,
        )
        dtype = getattr(torch, number_type(backend.get_name(), like_gpus))
        numbers = torch.full((num_heads,), NO_SCORE, dtype=dtype)
        self.register_buffer("numbers", numbers, persistent=False)
        self.attention = make_attention(
            num_heads=num_heads, attn_backend=backend, sinks=self.numbers
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        (owner,) = self._owner
        key_GD, value_GD = (getattr(owner, name)[self.groups] for name in (KEY, VALUE))
        num_groups, _, repeats = self.twice
        size = key_GD.shape[-1]
        query_NGRD = query.unflatten(-1, (num_groups, repeats, self.padded))
        score_NGR = (query_NGRD[..., :size].float() * key_GD[:, None].float()).sum(-1) * self.scale
        has_left_N = owner.bosch_positions >= self.attention.sliding_window
        # (N, G, 2, R, D): each group's heads, then the same once more. An attention shares KV heads
        # among neighbors, so both times must stand within the group.
        both = query_NGRD[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1)
        set_numbers(self.numbers, choose_numbers(score_NGR, has_left_N), both)
        found = self.attention(both, key, value).unflatten(-1, (*self.twice, self.padded)).float()
        plain_NGRD, damped_NGRD = found.unbind(2)
        # Read where the kernel read them: a compiler leaves out a rounding that is undone at once.
        numbers_GR = self.numbers.view(self.twice)[:, 1].float()
        share_NGR = sink_share(plain_NGRD, damped_NGRD, score_NGR, numbers_GR)
        share_NGR = torch.where(has_left_N[:, None, None], share_NGR, 0)
        value_GD = nn.functional.pad(value_GD.float(), (0, self.padded - size))
        value_NGRD = value_GD[:, None].expand_as(plain_NGRD)
        out_NGRD = torch.lerp(plain_NGRD, value_NGRD, share_NGR[..., None])
        return out_NGRD.to(query.dtype).flatten(1)


def add_parameters(owner: Any, num_windowed: int, head_size: int) -> None:
    """Loaded from the folder with the layer's other weights."""
    for name in (KEY, VALUE):
        empty = torch.empty(num_windowed, head_size)
        owner.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def keep_positions(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        module.bosch_positions = named["positions"]

    owner.register_forward_pre_hook(keep_positions, with_kwargs=True)
