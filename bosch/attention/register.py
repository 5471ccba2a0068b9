"""The attention function and the mask function registered with transformers under the name `bosch`.

SEARCH: a stock model of a family in bosch/families takes a mask of groups as an argument of its
forward call (search_mode.py). DEPLOY: a materialized model has `config.bosch`; in each layer its
groups are ordered [full..., window...], and each kind is computed by one call. Further
arguments: `bosch_backend` names a backend (so does `config.bosch_backend`, for every call),
`cu_seq_lens_q` says where packed documents end if their position_ids do not, `bosch_pieces` that
other ranks have the rest of each sequence (pieces.py, which a hybrid's folder has no copy of), and
`bosch_observe` takes a stock layer's number, queries, keys, values, scaling and output, and returns
the output.
"""
# B batch, H query heads, G kv heads, T queries, S keys, L keys of a window cache, D head size, N 1
# or H

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from bosch.attention.cache import Split
from bosch.attention.call import AttentionCall
from bosch.attention.dispatch import attend
from bosch.attention.documents import (
    MASK_TYPE,
    NOT_CAUSAL,
    bosch_mask_function,
    hides_nothing,
    keep_documents_apart,
)
from bosch.attention.search_mode import Mask, has_empty_slots, search_parts
from bosch.attention.sink_keys import sink_keys
from bosch.attention.slots import Step, num_seen, sees_sink, visible_slots
from bosch.masks.window import check_window, full_layers, own_window
from bosch.plugins import list_plugins
from bosch.run.errors import UserError

logger = logging.getLogger("bosch")

# The code in a hybrid's folder registers a name of its own, so that checkpoints of different
# versions, and the package, can be loaded in one process.
NAME = "bosch" if __name__ == "bosch.attention.register" else f"bosch_{crc32(__name__.encode())}"
FAMILIES = list_plugins("bosch.families")

# Arguments from transformers that do not change the attention output. Any other is refused if it is
# set: ignoring `s_aux`, `softcap` or a misspelled `bosch_mask` would silently give wrong numbers.
HARMLESS = frozenset(
    "use_cache cache_position position_embeddings num_items_in_batch ignore_index shift_labels "
    "return_dict output_hidden_states output_router_logits max_length_q max_length_k "
    "cu_seq_lens_k "  # the same as cu_seq_lens_q
    "tokenizer assistant_tokenizer".split()  # of generate, for stop strings and drafts
)


def register() -> None:
    """Register `attn_implementation="bosch"`. Without its mask function, padding would be lost."""
    AttentionInterface.register(NAME, bosch_attention)
    AttentionMaskInterface.register(NAME, bosch_mask_function)


def bosch_attention(
    module: Any,
    query_BHTD: Tensor,
    key: Any,  # a tensor, or both are the `Split` of a hybrid's cache
    value: Any,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    bosch_mask: Mask | None = None,
    bosch_window: int | None = None,
    bosch_gates: Tensor | None = None,
    bosch_backend: str | None = None,
    bosch_observe: Callable[..., Tensor] | None = None,
    bosch_pieces: Any = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention of one layer: (B, T, H, D), and no weights."""
    config, num_queries = module.config, query_BHTD.shape[2]
    is_hybrid = isinstance(key, Split) or getattr(config, "bosch", None) is not None
    if not is_hybrid and config.model_type not in FAMILIES:
        # Some drop arguments: StableLM drops bosch_mask, OPT the positions of documents.
        raise UserError(
            f"attn_implementation='bosch' does not know the model_type {config.model_type!r}: such "
            "models may drop masks or packed documents before attention is computed. It knows "
            f"{', '.join(FAMILIES)}; to add one, write a file in bosch/families."
        )
    own = own_window(config, module.layer_idx)
    if own is not None and others.get("sliding_window") == own:
        del others["sliding_window"]
    _refuse_unknown(others)
    if bosch_pieces is not None:
        assert attention_mask is None
        make_call = partial(AttentionCall, scaling=scaling, dropout=dropout)
        backend = bosch_backend or getattr(config, "bosch_backend", None)
        return bosch_pieces.attend(module, query_BHTD, key, value, make_call, backend), None
    if isinstance(key, Split) and attention_mask is not None and hides_nothing(attention_mask):
        attention_mask = None
    if attention_mask is not None and attention_mask.dtype not in (torch.bool, MASK_TYPE):
        problem = f"attn_implementation='bosch' was given a mask of type {attention_mask.dtype}"
        raise UserError(f"{problem}; it needs a boolean one (True: visible).")
    # Of a static cache a tensor: reading it would make a GPU wait, and a compiled step new.
    num_past = key.first_query if isinstance(key, Split) else key.shape[2] - num_queries
    if isinstance(key, Split) and isinstance(num_past, int) and attention_mask is not None:
        attention_mask = attention_mask[..., : num_past + num_queries]  # no empty slots
    mask_BNTS, documents = keep_documents_apart(
        query_BHTD, num_past, attention_mask, position_ids, cu_seq_lens_q, module.layer_idx
    )
    if (
        (is_hybrid or bosch_window is not None)
        # The caller's own, which replaces the causal rule.
        and (attention_mask is not None and attention_mask.dtype == torch.bool)
        and (isinstance(num_past, int) and not torch.compiler.is_compiling())
        and attention_mask.triu(num_past + 1).any()
    ):
        problem = "this attention_mask lets a query see a later key, which windows cannot do"
        raise UserError(f"{problem}: use a causal mask, or the dense model.")
    # What the calls of all parts of the layer have in common.
    make_call = partial(
        AttentionCall, scaling=scaling, mask_BNTS=mask_BNTS, documents=documents, dropout=dropout
    )
    backend = bosch_backend or getattr(config, "bosch_backend", None)
    if not is_hybrid:
        call = make_call(query_BHTD, key, value)
        if own is not None:  # a layer that no mask chooses
            if bosch_window is not None and not full_layers(config):
                problem = f"every layer of this model has a window of its own ({own} tokens)"
                raise UserError(f"{problem}, so a mask would change nothing. Leave it out.")
            # With empty slots the end of the keys is not that of the text; the mask has the window.
            ends = not has_empty_slots(query_BHTD, key, mask_BNTS)
            call = replace(call, window_tokens=own if ends else None)
            return attend(call, backend).transpose(1, 2).contiguous(), None
        parts = search_parts(module, call, bosch_mask, bosch_window, bosch_gates)
        outputs = []
        for call in parts.calls:
            outputs.append(attend(call, backend).transpose(1, 2))
        out_BTHD = parts.join(outputs).contiguous()
        if bosch_observe is not None:
            layer = full_layers(config).index(module.layer_idx)
            out_BTHD = bosch_observe(layer, query_BHTD, key, value, scaling, out_BTHD)
        return out_BTHD, None
    if any(given is not None for given in (bosch_mask, bosch_window, bosch_gates, bosch_observe)):
        problem = "bosch_mask, bosch_window and bosch_gates are for stock models"
        raise UserError(f"{problem}; this one is a hybrid, whose groups are fixed.")
    calls = _calls_of_hybrid(module, query_BHTD, key, value, mask_BNTS, make_call)
    outputs = [attend(call, backend).transpose(1, 2) for call in calls]
    out_BTHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return out_BTHD.contiguous(), None


def _calls_of_hybrid(
    module: Any, query_BHTD: Tensor, key: Any, value: Any, mask_BNTS: Any, make_call: Any
) -> list[AttentionCall]:
    """One for the layer's full groups, and one for its groups with a window."""
    config, num_queries = module.config, query_BHTD.shape[2]
    bosch, num_groups = config.bosch, config.num_key_value_heads
    num_full, own = bosch["num_full"][module.layer_idx], own_window(config, module.layer_idx)
    # By the tensors, not by the config: a plan for tensor parallelism cuts heads without telling
    # it.
    parts = [pair[0] for pair in key[:2] if pair] if isinstance(key, Split) else [key]
    num_given = sum(part.shape[1] for part in parts)
    if num_given != num_groups:
        raise UserError(
            f"layer {module.layer_idx} of this hybrid has {num_groups} KV heads, but this process "
            f"holds {num_given} of them. Tensor parallelism does not keep full and window groups "
            "apart: load the model without tp_plan."
        )
    if mask_BNTS is not None and mask_BNTS.shape[1] != 1:
        problem = f"the mask has {mask_BNTS.shape[1]} heads, but the heads of a hybrid are permuted"
        raise UserError(f"{problem}; give one mask for all heads.")
    if not isinstance(key, Split):  # no cache, or a plain dynamic one with all positions
        if has_empty_slots(query_BHTD, key, mask_BNTS):
            raise UserError(
                "the base model of a hybrid cannot use a static cache by itself, because the empty "
                "slots would count as text. Call the whole model (with logits_to_keep=1 for the "
                "last logits only), or use a DynamicCache."
            )
        num_past = key.shape[2] - num_queries
        if num_past and num_full < num_groups and own is None and not torch.compiler.is_compiling():
            mention_plain_cache()
        sizes = num_full, num_groups - num_full
        k, v = (x.split(sizes, dim=1) for x in (key, value))
        key = Split((k[0], v[0]), (k[1], v[1]), num_past)

    calls = []
    num_full_heads = num_full * (query_BHTD.shape[1] // num_groups)
    if num_full:
        q_BHTD, (k_BGSD, v_BGSD) = query_BHTD[:, :num_full_heads], key.full
        if key.step is not None:
            calls.append(_over_slots(make_call(q_BHTD, k_BGSD, v_BGSD), key.step))
        else:
            # A static cache has empty slots after the keys.
            end = key.first_query + num_queries if isinstance(key.first_query, int) else None
            if k_BGSD.shape[2] != end:
                k_BGSD, v_BGSD = k_BGSD[:, :, :end], v_BGSD[:, :, :end]
            calls.append(make_call(q_BHTD, k_BGSD, v_BGSD))
    if num_full < num_groups:
        windowed = make_call(query_BHTD[:, num_full_heads:], *key.window)
        calls.append(_windowed(module, windowed, key, own or check_window(bosch["window"])))
    return calls


def _over_slots(call: AttentionCall, step: Step, window_tokens: int | None = None) -> AttentionCall:
    """A token decoded over a static cache, whose slots are the call's keys."""
    mask_BNTS, num_slots = call.mask_BNTS, call.k_BGSD.shape[2]
    # For kernels on GPUs, which can be told a number.
    counts = mask_BNTS is None and call.q_BHTD.device.type != "cpu"
    seen = num_seen(step, num_slots) if counts else None
    visible = visible_slots(step, mask_BNTS, num_slots, window_tokens)
    return replace(call, mask_BNTS=visible, num_seen=seen)


def _windowed(
    module: Any, windowed: AttentionCall, key: Split, window_tokens: int
) -> AttentionCall:
    """The call of the groups with a window: how the keys of the cache are seen."""
    mask_BNTS = windowed.mask_BNTS
    num_queries, num_keys = windowed.q_BHTD.shape[2], windowed.k_BGSD.shape[2]
    if key.sink_place is not None:  # the cache does not know the constants
        constants = module.window_sink_key.detach(), module.window_sink_value.detach()
        if isinstance(key.sink_place, Tensor):  # both are one write
            batch = len(windowed.q_BHTD)
            torch.cat([x_GD.expand(batch, -1, -1) for x_GD in constants], out=key.sink_place)
        else:
            for place_BGD, constant_GD in zip(key.sink_place, constants, strict=True):
                place_BGD.copy_(constant_GD)
    sink = None
    if not key.has_sink_entry:
        call = replace(windowed, window_tokens=window_tokens)
        sink = sink_keys(module, call, window_tokens, key.first_query, key.first)
    if key.step is not None:
        # The slots are out of order, so no window can be counted from the end of the keys.
        return replace(_over_slots(windowed, key.step, window_tokens), sink=sink)
    if key.has_sink_entry:  # the sink, and then exactly the window
        if mask_BNTS is not None:
            own = mask_BNTS[..., 1 - num_keys :]
            sees_BNT1 = sees_sink(mask_BNTS, key.first_query, window_tokens)
            mask_BNTS = torch.cat([sees_BNT1, own], -1)
        return replace(windowed, mask_BNTS=mask_BNTS)
    if isinstance(key.first_query, Tensor):
        # A chunk of a prompt in a static cache: W - 1 positions before it and its own, of which
        # those before the text's beginning are negative.
        last = key.first_query + num_queries
        positions_L = last - num_keys + torch.arange(num_keys, device=last.device)
        queries_T1 = (last - num_queries + torch.arange(num_queries, device=last.device))[:, None]
        inside_TL = (positions_L >= 0) & (positions_L <= queries_T1)
        inside_TL &= positions_L > queries_T1 - window_tokens
        assert mask_BNTS is not None
        mask_BNTS = mask_BNTS.index_select(-1, positions_L.clamp_min(0)) & inside_TL
        return replace(windowed, mask_BNTS=mask_BNTS, sink=sink)
    if mask_BNTS is not None:  # its last columns are those of the keys
        mask_BNTS = mask_BNTS[..., -num_keys:]
    return replace(windowed, mask_BNTS=mask_BNTS, window_tokens=window_tokens, sink=sink)


@functools.cache
def mention_plain_cache() -> None:
    """Said once: every token is right, so nobody would notice the memory."""
    logger.warning(
        "This hybrid decodes with a plain cache, in which its window groups keep all positions: no "
        "memory is saved. Call the whole model (not model.model) with an empty cache or none."
    )


def _refuse_unknown(others: dict[str, object]) -> None:
    if others.pop("is_causal", None) is False:
        raise UserError(NOT_CAUSAL)
    for name, value in others.items():
        if name in HARMLESS or value is None or value is False:
            continue
        if name == "sliding_window":
            raise UserError(
                f"this model has a sliding window of its own ({value} tokens), which cannot be "
                "combined with attn_implementation='bosch'. To use full attention everywhere, load "
                "it with sliding_window=None."
            )
        raise UserError(
            f"attn_implementation='bosch' does not support the argument {name} and would ignore "
            "it. Leave it out."
        )
