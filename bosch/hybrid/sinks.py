"""Sinks: what a group with a window sees of the text that has left its window.

`tokens=S`: the first S tokens of the text, or of the packed document. They stay in the KV cache.
`static`: a constant key and value of each group, in the place of the first token. They take no KV;
in a hybrid they are parameters (groups, D) of each attention module that has groups with a window.
"""
# B batch, L layers, G kv heads, T queries, S keys, N keys of a sink, M texts in a row, D head size

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bosch.attention.call import AttentionCall, Sink
from bosch.masks.window import sink_from_json, sink_tokens
from bosch.run.errors import UserError

KEY, VALUE = "window_sink_key", "window_sink_value"  # of a hybrid's attention modules
ATTACHED = "search_sink"  # attribute of a dense model and of its attention modules
Source = tuple[Tensor, Tensor] | int  # key and value (G, D), or how many first tokens


class Sinks(NamedTuple):
    """Of all groups of a dense model."""

    keys_LGD: Tensor
    values_LGD: Tensor


def make_sink(
    source: Source | None,
    window_tokens: int,
    num_past: int | Tensor,
    call: AttentionCall,
    first: tuple[Tensor, Tensor] | None = None,
) -> Sink | None:
    """The sink of a call whose groups get this window; None where nobody sees it. The keys and the
    mask of `call` are those of full attention, except that a cache which has dropped the first
    tokens gives them as `first`."""
    num_queries, device = call.q_BHTD.shape[2], call.q_BHTD.device
    # A number that is traced while compiling is no int.
    if source is None or (isinstance(num_past, int) and num_past + num_queries <= window_tokens):
        return None
    documents, mask_BNTS = call.documents, call.mask_BNTS
    if documents is not None:
        position_BT = documents.position_BT
    elif mask_BNTS is not None:  # padding, or the empty slots of a static cache
        position_BT = mask_BNTS[:, 0].sum(-1) - 1
    else:
        position_BT = (torch.arange(num_queries, device=device) + num_past)[None]
    beyond_BT = position_BT - window_tokens
    if first is not None and documents is None:  # else nothing is past, and all keys are here
        return sink_beyond(source, beyond_BT, *first)
    k_BGSD, v_BGSD = call.k_BGSD, call.v_BGSD
    if not isinstance(source, int) or (documents is None and mask_BNTS is None):
        return sink_beyond(source, beyond_BT, k_BGSD, v_BGSD)

    # Texts that begin anywhere: each row's, or each document's, first tokens.
    numbers_N = torch.arange(source, device=device)
    if documents is None:
        assert mask_BNTS is not None
        sees_BT, begins_BT = mask_BNTS[:, 0].any(-1), mask_BNTS[:, 0].to(torch.uint8).argmax(-1)
        starts_BM = begins_BT.where(sees_BT, 0).amax(1, keepdim=True)
        if not torch.compiler.is_compiling() and (sees_BT & (begins_BT != starts_BM)).any():
            problem = f"windows with the sink tokens={source} need one text in a row with a mask"
            raise UserError(f"{problem}. Pass packed documents without padding.")
        seen_BTN = beyond_BT[..., None] >= numbers_N
    else:
        most = max(map(len, documents.ends)) - 1
        rows = [(*ends[:-1], *(most + 1 - len(ends)) * ends[-1:]) for ends in documents.ends]
        starts_BM = torch.tensor(rows, device=device)
        index_N = torch.arange(most, device=device).repeat_interleave(source)
        seen_BTN = documents.index_BT()[..., None] == index_N
        seen_BTN &= beyond_BT[..., None] >= numbers_N.repeat(most)
    columns_BN = (starts_BM[..., None] + numbers_N).flatten(1).clamp_max(k_BGSD.shape[2] - 1)
    k_BGND, v_BGND = (
        x.gather(2, columns_BN[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
        for x in (k_BGSD, v_BGSD)
    )
    return Sink(k_BGND, v_BGND, seen_BTN, None if documents is None else source)


def sink_beyond(source: Source, beyond_BT: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Sink:
    """The sink of texts that all begin at the first key. `beyond_BT`: of each query, the last
    position that has left its window; negative where there is none."""
    if not isinstance(source, int):
        key_GD, value_GD = source
        return Sink(key_GD[None, :, None], value_GD[None, :, None], beyond_BT[..., None] >= 0)
    k_BGND, v_BGND = k_BGSD[:, :, :source], v_BGSD[:, :, :source]
    numbers_N = torch.arange(k_BGND.shape[2], device=beyond_BT.device)
    return Sink(k_BGND, v_BGND, beyond_BT[..., None] >= numbers_N)


def attach_sinks(model: Any, sinks: Sinks | int | None) -> Sinks | int | None:
    """From now on every mask that a dense model is called with has these sinks, or as many first
    tokens. None: none. Returns what it had before."""
    before: Sinks | int | None = getattr(model, ATTACHED, None)
    if isinstance(sinks, Sinks):
        sinks = Sinks(*(x_LGD.to(model.device, model.dtype) for x_LGD in sinks))
    setattr(model, ATTACHED, sinks)
    for layer, block in enumerate(model.base_model.layers):
        source = tuple(x[layer] for x in sinks) if isinstance(sinks, Sinks) else sinks
        setattr(block.self_attn, ATTACHED, source)
    return before


def add_sinks(model: Any, config: Any) -> None:
    """Give a hybrid the parameters that its config asks for."""
    if kind_of(config) != "static":
        return
    num_groups = config.num_key_value_heads
    for layer, num_full in zip(model.base_model.layers, config.bosch["num_full"], strict=True):
        weight = layer.self_attn.k_proj.weight
        shape = (num_groups - num_full, weight.shape[0] // num_groups)
        for name in (KEY, VALUE) if num_full < num_groups else ():
            layer.self_attn.register_parameter(name, nn.Parameter(weight.new_zeros(shape)))


def kind_of(config: Any) -> str:
    """none, static or tokens=S."""
    return sink_from_json(config.bosch.get("sink", "none"))


def is_sink(name: str) -> bool:
    return name.rpartition(".")[2] in (KEY, VALUE)


def source_of(module: Any) -> Source | None:
    """What the windows of a hybrid's layer see."""
    key_GD = getattr(module, KEY, None)
    if key_GD is not None:
        return key_GD, getattr(module, VALUE)
    return sink_tokens(kind_of(module.config)) or None
