"""What the queries of one call of attention see of a sink (bosch/sink.py): keys, values, and from
which query on. `sink_keys` finds them for a text wherever it begins: in a plain batch, behind
padding, in the slots of a static cache, or among packed documents."""
# B batch, G kv heads, T queries, S keys, N keys of a sink, M texts in a row, D head size

from typing import Any

import torch
from torch import Tensor

from bosch.attention.call import AttentionCall, Documents, SinkKeys
from bosch.attention.slots import is_behind_window
from bosch.run.errors import UserError
from bosch.sink import KEY, NO_SINK


def sink_keys(
    module: Any,
    call: AttentionCall,
    window_tokens: int,
    num_past: int | Tensor,
    first: tuple[Tensor, Tensor] | None = None,
) -> SinkKeys | None:
    """What the queries of `call` see of an attention module's sink if its groups get this window;
    None where nobody sees it. The keys and the mask of `call` are those of full attention, except
    that a cache which has dropped the first tokens gives them as `first`."""
    if getattr(module, "window_sink", NO_SINK).kind == "none":
        return None
    # No query has anything behind its window yet: plain attention, and no merge. (A number that is
    # traced while compiling is no int.)
    is_within = isinstance(num_past, int) and num_past + call.q_BHTD.shape[2] <= window_tokens
    if is_within and not learns(module):
        return None
    return keys_of_sink(module, call, window_tokens, num_past, first)


def learns(module: Any) -> bool:
    """Whether a sink's constants are trained. Then they are in the graph of every step, with a
    gradient of zero where nobody sees them: DDP waits for that of each weight."""
    constant = getattr(module, KEY, None)
    return constant is not None and constant.requires_grad and torch.is_grad_enabled()


def keys_of_sink(
    module: Any,
    call: AttentionCall,
    window_tokens: int,
    num_past: int | Tensor,
    first: tuple[Tensor, Tensor] | None = None,
) -> SinkKeys:
    """The same of a module that has a sink, also where no query sees it."""
    sink, num_queries, device = module.window_sink, call.q_BHTD.shape[2], call.q_BHTD.device
    # A query sees what has left its window: up to this position of its text, or document.
    if call.documents is not None:
        beyond_BT = call.documents.position_BT - window_tokens
    # Padding, or the empty slots of a static cache.
    elif (mask_BNTS := call.mask_BNTS) is not None:
        is_behind_TS = is_behind_window(mask_BNTS, num_past, window_tokens)
        beyond_BT = (mask_BNTS[:, 0] & is_behind_TS).sum(-1) - 1
    else:
        position_BT = (torch.arange(num_queries, device=device) + num_past)[None]
        beyond_BT = position_BT - window_tokens

    # First tokens that the cache has kept stand where the text begins, whatever padding is before
    # it. Packed documents have no past, so all their keys are here; so are those of a row's
    # beginning, where several texts beside padding are told from one, and refused.
    begins = isinstance(num_past, int) and num_past == 0 and call.mask_BNTS is not None
    if first is not None and call.documents is None and not begins:
        return keys_beyond(module, beyond_BT, *first)
    # Without a mask the text begins at the first key; a constant needs no key of the text at all.
    if sink.kind == "static" or (call.documents is None and call.mask_BNTS is None):
        return keys_beyond(module, beyond_BT, call.k_BGSD, call.v_BGSD)
    if call.documents is None:
        return _behind_padding(call, sink.num_tokens, beyond_BT)
    return _of_documents(call, call.documents, sink.num_tokens, beyond_BT)


def keys_beyond(module: Any, beyond_BT: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> SinkKeys:
    """For texts that all begin at the first of these keys. `beyond_BT`: of each query, the last
    position that has left its window; negative where there is none."""
    sink = module.window_sink
    if sink.kind == "static":
        key_GD, value_GD = module.window_sink_key, module.window_sink_value
        seen_BTN = beyond_BT[..., None] >= 0
        return SinkKeys(key_GD[None, :, None], value_GD[None, :, None], seen_BTN)
    k_BGND, v_BGND = k_BGSD[:, :, : sink.num_tokens], v_BGSD[:, :, : sink.num_tokens]
    numbers_N = torch.arange(k_BGND.shape[2], device=beyond_BT.device)
    return SinkKeys(k_BGND, v_BGND, beyond_BT[..., None] >= numbers_N)


def _behind_padding(call: AttentionCall, num_first: int, beyond_BT: Tensor) -> SinkKeys:
    """The first tokens of each row's text, which begins where its mask does."""
    assert call.mask_BNTS is not None
    sees_BT, begins_BT = call.mask_BNTS[:, 0].any(-1), call.mask_BNTS[:, 0].byte().argmax(-1)
    # A query of padding sees nothing, and argmax says 0 of nothing: so the latest beginning is that
    # of the text. All queries of a row must agree on it.
    start_B1 = begins_BT.where(sees_BT, 0).amax(1, keepdim=True)
    if not torch.compiler.is_compiling() and (sees_BT & (begins_BT != start_B1)).any():
        raise UserError(
            f"windows with the sink tokens={num_first} need one text in a row with a mask. Pass "
            "packed documents without padding."
        )
    numbers_N = torch.arange(num_first, device=beyond_BT.device)
    return SinkKeys(
        _gather(call.k_BGSD, start_B1 + numbers_N),
        _gather(call.v_BGSD, start_B1 + numbers_N),
        seen_BTN=beyond_BT[..., None] >= numbers_N,
    )


def _of_documents(
    call: AttentionCall, documents: Documents, num_first: int, beyond_BT: Tensor
) -> SinkKeys:
    """The first tokens of each packed document, which only its own queries see."""
    # A query sees those of its own document which have left its window: number <= its position - W.
    # With S = 2 and documents that end at 3 and 5 in a row of 8 tokens, N = 6 keys of the sink:
    #
    #     columns_BN     0 1   3 4   5 6
    #     document_N     0 0   1 1   2 2
    #     numbers_N      0 1   0 1   0 1
    numbers_N = torch.arange(num_first, device=beyond_BT.device)
    most = max(map(len, documents.ends)) - 1  # documents in a row
    # Rows of fewer repeat their last start: no query belongs to what is added.
    starts = [(*ends[:-1], *[ends[-1]] * (most + 1 - len(ends))) for ends in documents.ends]
    starts_BM = torch.tensor(starts, device=beyond_BT.device)
    columns_BN = (starts_BM[..., None] + numbers_N).flatten(1)
    document_N = torch.arange(most, device=beyond_BT.device).repeat_interleave(num_first)
    is_own_BTN = documents.index_BT()[..., None] == document_N
    return SinkKeys(
        _gather(call.k_BGSD, columns_BN),
        _gather(call.v_BGSD, columns_BN),
        seen_BTN=is_own_BTN & (beyond_BT[..., None] >= numbers_N.repeat(most)),
        of_document=num_first,
    )


def _gather(x_BGSD: Tensor, columns_BN: Tensor) -> Tensor:
    """(B, G, N, D): these columns. One behind the text's end, which nobody sees, is the last."""
    # A mask may be one for all rows, and of fewer rows of places gather takes so many rows alone.
    columns_BN = columns_BN.clamp_max(x_BGSD.shape[2] - 1).expand(len(x_BGSD), -1)
    index_BGND = columns_BN[:, None, :, None].expand(-1, x_BGSD.shape[1], -1, x_BGSD.shape[3])
    return x_BGSD.gather(2, index_BGND)
