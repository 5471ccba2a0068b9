"""Attention in a few lines, to compare with the paper; other backends are tested against it."""
# B batch, H query heads, G kv heads, T queries, S keys, D head size, N 1 or H

import torch
from torch import Tensor

from bosch.attention.call import AttentionCall, repeat_groups


def unavailable() -> str | None:
    return None


def supports(call: AttentionCall) -> str | None:
    if call.mask_BNTS is not None and call.mask_BNTS.shape[1] > 1:
        return "it takes one mask for all heads"
    return "it has no dropout" if call.dropout else None


def priority(call: AttentionCall) -> None:
    return None


def attend(call: AttentionCall) -> Tensor:
    batch, num_heads = call.q_BHTD.shape[:2]
    # A mask may be one for all rows.
    visible_BHTS = visible(call, call.window_tokens).expand(batch, num_heads, -1, -1)
    k_BHSD, v_BHSD = (repeat_groups(x, num_heads) for x in (call.k_BGSD, call.v_BGSD))

    # At least float32, so that this is what others are compared with in any type.
    exact = torch.promote_types(call.q_BHTD.dtype, torch.float32)
    scores_BHTS = call.q_BHTD.to(exact) @ k_BHSD.to(exact).transpose(2, 3) * call.scaling
    if (sink := call.sink) is not None:  # more keys, in front
        keys_BHND, values_BHND = (
            repeat_groups(x_BGND, num_heads).expand(len(k_BHSD), -1, -1, -1)
            for x_BGND in (sink.k_BGND, sink.v_BGND)
        )
        sink_BHTN = call.q_BHTD.to(exact) @ keys_BHND.to(exact).transpose(2, 3) * call.scaling
        scores_BHTS = torch.cat([sink_BHTN, scores_BHTS], -1)
        v_BHSD = torch.cat([values_BHND.to(v_BHSD.dtype), v_BHSD], 2)
        visible_BHTS = torch.cat([sink.seen_BTN[:, None].expand_as(sink_BHTN), visible_BHTS], -1)
    scores_BHTS = scores_BHTS.masked_fill(~visible_BHTS, float("-inf"))
    # A padding query sees nothing. Its row is 0, not NaN as from an empty softmax.
    sees_nothing = ~visible_BHTS.any(-1, keepdim=True)
    weights_BHTS = scores_BHTS.masked_fill(sees_nothing, 0).softmax(-1).masked_fill(sees_nothing, 0)
    return (weights_BHTS @ v_BHSD.to(exact)).to(call.q_BHTD.dtype)


def visible(call: AttentionCall, window_tokens: int | None) -> Tensor:
    """(B, 1, T, S) bool: which keys each query sees."""
    (batch, _, num_queries, _), num_keys = call.q_BHTD.shape, call.k_BGSD.shape[2]
    keys_S = torch.arange(num_keys, device=call.q_BHTD.device)
    queries_T1 = keys_S[num_keys - num_queries :, None]
    mask_BNTS = call.mask_BNTS
    if mask_BNTS is None:
        mask_BNTS = (keys_S <= queries_T1).expand(batch, 1, num_queries, num_keys)
    if window_tokens is not None:
        mask_BNTS = mask_BNTS & (keys_S > queries_T1 - window_tokens)
    if call.documents is not None:
        index_BT = call.documents.index_BT()
        mask_BNTS = mask_BNTS & (index_BT[:, None, :, None] == index_BT[:, None, None, :])
    return mask_BNTS
