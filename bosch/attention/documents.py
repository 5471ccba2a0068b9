"""Which keys a query sees: the mask function registered with transformers, and packed documents,
where one ends and the next begins by position ids that start again."""
# B batch, T tokens, S keys, N 1 or the number of heads

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from bosch.attention.call import Documents
from bosch.masks.window import own_windows
from bosch.run.errors import UserError

# Masks made by our mask function have this type. Those of callers are bool. A type can be seen in a
# compiled model too, and in a copy on another device.
MASK_TYPE = torch.int8
NOT_CAUSAL = (
    "attn_implementation='bosch' computes causal attention only, but this call or its config has "
    "is_causal=False."
)
_MEMO = "_bosch_documents"  # attribute of position_ids, for the layers after the first one


def bosch_mask_function(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,  # a tensor where the cache is static
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> Tensor | None:
    """None for every causal call without padding, packed ones included: the attention function
    aligns queries and keys itself and finds documents in the position ids. So long texts need no
    T x S mask, which transformers builds for prompt chunks and packed documents.
    """
    config = others.get("config")
    if others.get("allow_is_bidirectional_skip") or not getattr(config, "is_causal", True):
        raise UserError(NOT_CAUSAL)
    # A static cache has empty slots after the keys. Our own models know how many. For others
    # the mask shows them, and so it does for the base model of a hybrid by itself, except at the
    # start of a cache, where the position ids of several tokens are enough.
    is_hybrid = getattr(config, "bosch", None) is not None
    # Layers with windows of their own are told them by the config, and count them as ours.
    has_own = bool(own_windows(config)) if getattr(config, "layer_types", None) else False
    is_plain = not others.get("use_vmap") and (others.get("local_size") is None or has_own)
    if (
        (is_plain and isinstance(q_offset, int) and not torch.compiler.is_compiling())
        and ((is_hybrid and q_length > 1) or kv_offset + kv_length == q_offset + q_length)
        and (allow_is_causal_skip or _hides_the_next(q_length, **others))
        and (attention_mask is None or attention_mask[:, : q_offset + q_length].all())
    ):
        return None
    mask_BNTS = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        **others,
    )
    return None if mask_BNTS is None else as_type(mask_BNTS, MASK_TYPE)


def nothing_hidden(device: torch.device) -> Tensor:
    """In the place of a mask for a step of decoding in which a static cache knows all that the new
    token sees: a mask without columns. (For None, transformers would make one at each step.)"""
    return torch.empty(1, 1, 1, 0, dtype=MASK_TYPE, device=device)


def hides_nothing(mask: Tensor) -> bool:
    return mask.dim() == 4 and mask.shape[-1] == 0


def _hides_the_next(q_length: int, mask_function: Any = None, device: Any = None, **_: Any) -> bool:
    """Whether no query sees the next token, as in causal and packed masks."""
    if mask_function is None or q_length < 2:
        return True
    # Each token and its next, not all T x T pairs: what lets tokens see later ones, as a prefix or
    # an image does, lets one of them see the next.
    here = torch.arange(q_length - 1, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    return not torch.as_tensor(mask_function(zero, zero, here, here + 1)).any()


def keep_documents_apart(
    q_BHTD: Tensor,
    num_past: int | Tensor,
    mask_BNTS: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    layer: int,
) -> tuple[Tensor | None, Documents | None]:
    """The mask as bool, with packed documents hidden from each other; if there is no mask, the
    documents. A mask that the caller made is used unchanged. (transformers detects packed documents
    only without a cache, and a stock model has one by default.)
    """
    batch, _, num_queries, _ = q_BHTD.shape
    visible_BNTS = None if mask_BNTS is None else as_type(mask_BNTS, torch.bool)
    if num_queries == 1 or isinstance(num_past, Tensor):
        return visible_BNTS, None
    if cu_seqlens is not None:  # as flash-attention has them: one row of ends, from 0 on
        if batch != 1 or num_past:
            problem = "cu_seq_lens_q needs a batch of one row without a cache"
            raise UserError(f"{problem}; this one has {batch} rows and {num_past} cached tokens.")
        ends = tuple(cu_seqlens.tolist())
        if ends[0] != 0 or ends[-1] != num_queries or any(a >= b for a, b in pairwise(ends)):
            raise UserError(
                f"cu_seq_lens_q is {ends}; it must rise from 0 to the row's {num_queries} tokens."
            )
        return visible_BNTS, Documents((ends,), cu_seqlens.device)
    if position_ids is None or position_ids.shape[-1] != num_queries:
        return visible_BNTS, None
    if mask_BNTS is None:
        return None, find_documents(position_ids, batch, num_past, layer)
    if num_past or mask_BNTS.dtype != MASK_TYPE:
        return visible_BNTS, None
    return hide_other_documents(mask_BNTS, position_ids), None


@torch.compiler.disable
def find_documents(position_ids: Tensor, batch: int, num_past: int, layer: int) -> Documents | None:
    """The documents of a batch without padding; None if each row is a single document."""
    is_inference = position_ids.is_inference()
    call = (batch, num_past, None if is_inference else position_ids._version)
    memo = getattr(position_ids, _MEMO, None)
    documents: Documents | None = None
    # An inference tensor has no version, so changes in place are not seen. It is read again in each
    # forward pass, which begins when the layer number does not rise.
    if memo is not None and memo[0] == call and not (is_inference and layer <= memo[1]):
        documents = memo[2]
    else:
        starts_BT = position_ids.diff(dim=-1) != 1
        continues = num_past > 0 and bool((position_ids[:, 0] < num_past).any())
        if continues or bool(starts_BT.any()):
            if num_past:
                raise UserError(
                    f"the cache has {num_past} tokens, but the position ids of the new tokens do "
                    "not continue them. Packed documents cannot continue a cache: pass them in one "
                    "call, without one. (If it is a hybrid's base model with a static cache, call "
                    "the whole.)"
                )
            num_tokens = position_ids.shape[-1]
            rows = [
                (0, *(i + 1 for i, starts in enumerate(row) if starts), num_tokens)
                for row in starts_BT.tolist()
            ]
            rows = rows * batch if len(rows) == 1 else rows
            documents = Documents(tuple(rows), position_ids.device)
    setattr(position_ids, _MEMO, (call, layer, documents))
    return documents


def hide_other_documents(made_BNTS: Tensor, position_ids: Tensor) -> Tensor:
    """A mask made by our mask function for a padded batch, as bool, with packed documents hidden
    from each other. A document begins where the position of a real token does not rise."""
    mask_BNTS, is_compiling = as_type(made_BNTS, torch.bool), torch.compiler.is_compiling()
    memo = None if is_compiling else getattr(made_BNTS, _MEMO, None)
    if memo is not None and memo[0] is position_ids:
        apart_BNTS: Tensor = memo[1]
        return apart_BNTS
    is_real_BT = mask_BNTS[:, 0].diagonal(dim1=-2, dim2=-1)
    here_T = torch.arange(is_real_BT.shape[-1], device=mask_BNTS.device)
    last_real_BT = torch.where(is_real_BT, here_T, -1).cummax(-1).values
    # The last real token before each.
    previous_BT = torch.nn.functional.pad(last_real_BT, (1, -1), value=-1)
    position_BT = position_ids.expand_as(is_real_BT)
    before_BT = position_BT.gather(-1, previous_BT.clamp_min(0))
    begins_BT = is_real_BT & (previous_BT >= 0) & (position_BT <= before_BT)
    # The number of each token's document; padding has that of the token before it.
    index_BT = begins_BT.cumsum(-1)
    apart_BNTS = mask_BNTS
    if is_compiling or bool((index_BT != index_BT[:, :1]).any()):
        apart_BNTS = mask_BNTS & (index_BT[:, None, :, None] == index_BT[:, None, None, :])
    if not is_compiling:
        setattr(made_BNTS, _MEMO, (position_ids, apart_BNTS))
    return apart_BNTS


def as_type(mask_BNTS: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as bool or as MASK_TYPE. A view costs nothing, but inductor (torch 2.13) miscompiles
    it."""
    if torch.compiler.is_compiling():
        return mask_BNTS.to(dtype)
    return mask_BNTS.view(dtype)
