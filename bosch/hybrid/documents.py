"""Packed documents: where one ends and the next begins, read from position ids that start again."""
# B batch, T tokens, S keys, N 1 or the number of heads

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from bosch.backends._interface import Documents
from bosch.run.errors import UserError

# Masks of our mask function have this type, by which they are told from a caller's own, which are
# bool: also in a compiled model, and in a copy on another device.
MASK_TYPE = torch.int8
_MEMO = "_bosch_documents"  # attribute of a position_ids tensor: every layer asks the same question


@torch.compiler.disable
def find_documents(position_ids: Tensor, batch: int, num_past: int, layer: int) -> Documents | None:
    """The documents of an unpadded batch (None: each row is one), from positions that restart."""
    is_inference = position_ids.is_inference()
    call = (batch, num_past, None if is_inference else position_ids._version)
    memo = getattr(position_ids, _MEMO, None)
    # An inference tensor does not tell that it was changed in place: each forward pass, whose
    # layers rise, reads it anew.
    if memo is None or memo[0] != call or (is_inference and layer <= memo[1]):
        memo = (call, layer, _read_documents(position_ids, batch, num_past))
    documents: Documents | None = memo[2]
    setattr(position_ids, _MEMO, (call, layer, documents))
    return documents


def _read_documents(position_ids: Tensor, batch: int, num_past: int) -> Documents | None:
    starts_BT = position_ids.diff(dim=-1) != 1
    continues = num_past > 0 and bool((position_ids[:, 0] < num_past).any())
    if not continues and not bool(starts_BT.any()):
        return None
    if num_past:
        raise UserError(
            f"the cache holds {num_past} tokens, but the position ids of the new ones do not "
            "follow them: packed documents are read in one piece, without continuing a cache. "
            "(If the base model of a hybrid alone was given a static cache, empty slots count.)"
        )
    num_tokens = position_ids.shape[-1]
    rows = [
        (0, *(i + 1 for i, starts in enumerate(row) if starts), num_tokens)
        for row in starts_BT.tolist()
    ]
    rows = rows * batch if len(rows) == 1 else rows
    return Documents(tuple(rows), position_ids.device)


def given_documents(cu_seqlens: Tensor, batch: int, num_tokens: int, num_past: int) -> Documents:
    """Documents named by the caller as flash-attention does: ends in one row, starting with 0."""
    if batch != 1 or num_past:
        raise UserError(
            f"cu_seq_lens_q describes one row without a past; this batch has {batch} rows, "
            f"{num_past} past tokens."
        )
    ends = tuple(cu_seqlens.tolist())
    if ends[0] != 0 or ends[-1] != num_tokens or any(a >= b for a, b in pairwise(ends)):
        raise UserError(
            f"cu_seq_lens_q is {ends}; it must rise from 0 to the {num_tokens} tokens of the row."
        )
    return Documents((ends,), cu_seqlens.device)


def hide_other_documents(made_BNTS: Tensor, position_ids: Tensor) -> Tensor:
    """A mask of ours, of a padded batch, with packed documents hidden from each other: bool.

    Only tokens that are no padding count, and only positions that do not rise: padding in between,
    or positions that skip it, begin no document.
    """
    mask_BNTS = as_type(made_BNTS, torch.bool)
    if torch.compiler.is_compiling():
        index_BT = _document_index(mask_BNTS, position_ids)
        return mask_BNTS & (index_BT[:, None, :, None] == index_BT[:, None, None, :])
    memo = getattr(made_BNTS, _MEMO, None)
    if memo is None or memo[0] is not position_ids:
        index_BT = _document_index(mask_BNTS, position_ids)
        apart = None
        if bool((index_BT != index_BT[:, :1]).any()):
            apart = mask_BNTS & (index_BT[:, None, :, None] == index_BT[:, None, None, :])
        memo = (position_ids, apart)
        setattr(made_BNTS, _MEMO, memo)
    return mask_BNTS if memo[1] is None else memo[1]


def as_type(mask_BNTS: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of ours as bool, or back. A view is free, but inductor (torch 2.13) miscompiles it."""
    if torch.compiler.is_compiling():
        return mask_BNTS.to(dtype)
    return mask_BNTS.view(dtype)


def _document_index(mask_BNTS: Tensor, position_ids: Tensor) -> Tensor:
    """(B, T): the number of each token's document; padding carries that of the token before."""
    is_real_BT = mask_BNTS[:, 0].diagonal(dim1=-2, dim2=-1)
    here_T = torch.arange(is_real_BT.shape[-1], device=mask_BNTS.device)
    last_real_BT = torch.where(is_real_BT, here_T, -1).cummax(-1).values
    # The last real token before each.
    previous_BT = torch.nn.functional.pad(last_real_BT, (1, -1), value=-1)
    position_BT = position_ids.expand_as(is_real_BT)
    before_BT = position_BT.gather(-1, previous_BT.clamp_min(0))
    begins_BT = is_real_BT & (previous_BT >= 0) & (position_BT <= before_BT)
    return begins_BT.cumsum(-1)
