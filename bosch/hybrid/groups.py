"""Some groups of an attention call, and outputs of groups put back into their order."""
# B batch, H query heads, G kv heads, R query heads a group, T queries, D head size

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from bosch.backends._interface import AttentionCall


def pick(call: AttentionCall, groups: list[int]) -> AttentionCall:
    """The call of these groups alone."""
    num_groups = call.k_BGSD.shape[1]
    if groups == list(range(num_groups)):
        return call
    q_BGRTD = call.q_BHTD.unflatten(1, (num_groups, -1))
    k_BGSD, v_BGSD, mask = take(call.k_BGSD, groups), take(call.v_BGSD, groups), call.mask_BNTS
    if mask is not None and mask.shape[1] > 1:
        mask = take(mask.unflatten(1, (num_groups, -1)), groups).flatten(1, 2)
    return replace(
        call,
        q_BHTD=take(q_BGRTD, groups).flatten(1, 2),
        k_BGSD=k_BGSD,
        v_BGSD=v_BGSD,
        mask_BNTS=mask,
    )


def take(x_BG: Tensor, groups: Sequence[int]) -> Tensor:
    """These groups; neighbors in their order as a view."""
    first, last = groups[0], groups[-1]
    if list(groups) == list(range(first, last + 1)):
        return x_BG[:, first : last + 1]
    return x_BG[:, list(groups)]


def original_order(out_BTHD: Tensor, groups: list[int]) -> Tensor:
    """Outputs that come in the order of `groups`, in that of the model."""
    order = sorted(range(len(groups)), key=groups.__getitem__)
    if order == list(range(len(groups))):
        return out_BTHD
    out_BTGRD = out_BTHD.unflatten(2, (len(groups), -1))
    return out_BTGRD[:, :, order].flatten(2, 3)
