"""The flash-attn packages: version 3 (`flash_attn_interface`) on Hopper if installed, else 2."""
# B batch, H query heads, T queries, D head size

import inspect
import logging
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from bosch.attention.call import (
    AttentionCall,
    cumulative_lengths,
    flash_refusal,
    flat_tokens,
    in_rows,
    no_flash_device,
    window_size,
)
from bosch.attention.merge import attend_with_sink

logger = logging.getLogger("bosch")

VERSION_3 = "flash_attn_interface"  # its package


def unavailable() -> str | None:
    if reason := no_flash_device():
        return reason
    if find_spec("flash_attn") is None and find_spec(VERSION_3) is None:
        return "flash-attn is not installed (pip install --no-build-isolation flash-attn)"
    try:
        _kernel()  # found is not loaded: wheels are built for one version of torch
    except ImportError as error:
        return f"the installed flash-attn does not load ({error})"
    except AttributeError:
        return (
            "the installed flash-attn has no flash_attn_varlen_func (flash-attn-4 brings other "
            "functions; version 2 can be installed beside it)"
        )
    return None


def supports(call: AttentionCall) -> str | None:
    if call.dropout and "dropout_p" not in inspect.signature(_kernel()).parameters:
        return "flash-attn 3 has no dropout"
    if call.sink is not None and (call.needs_grad or call.dropout):
        return "its public functions have no gradient for sinks (varlen has)"
    return flash_refusal(call)


def priority(call: AttentionCall) -> int | None:
    return 3 if call.q_BHTD.device.type == "cuda" and not call.is_plain_full else None


def attend(call: AttentionCall) -> Tensor:
    kernel = partial(
        _kernel(),
        **cumulative_lengths(call)._asdict(),
        causal=True,
        softmax_scale=call.scaling,
        window_size=window_size(call.window_tokens),
    )
    if call.dropout:  # version 3 has no such argument
        kernel = partial(kernel, dropout_p=call.dropout)
    # torch's own kernels read this switch themselves.
    if torch.are_deterministic_algorithms_enabled():
        kernel = partial(kernel, deterministic=True)

    # By this argument it returns the log-sum-exp. Early releases of version 3 have no such argument
    # and return it always.
    has_choice = "return_attn_probs" in inspect.signature(_kernel()).parameters
    with_lse = {"return_attn_probs": True} if has_choice else {}

    def forward(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = kernel(*map(flat_tokens, tensors), **with_lse)
        return in_rows(out, lse, len(call.q_BHTD))

    if call.sink is not None:
        return attend_with_sink(call, forward, None)
    out = kernel(*map(flat_tokens, (call.q_BHTD, call.k_BGSD, call.v_BGSD)))
    if isinstance(out, tuple):  # some releases of version 3 also return the log-sum-exp
        out = out[0]
    return out.unflatten(0, (len(call.q_BHTD), -1)).transpose(1, 2)


def use_3_in_torch() -> None:
    """Where version 3 can run, make it torch's own flash kernel too, for this process: that of
    full attention without documents (sdpa) and of sinks with gradients (varlen). Without dropout,
    which it does not have."""
    activate = getattr(attention, "activate_flash_attention_impl", None)  # torch 2.11 brings it
    if activate is None or _package() != VERSION_3:
        return
    if attention.current_flash_attention_impl() is not None:  # the user has chosen one
        return
    try:
        activate("FA3")
    except (ImportError, RuntimeError) as error:
        logger.warning("torch keeps its own flash kernels: %s", error)


def _kernel() -> Any:
    """The variable-length function; both versions align queries to the last keys."""
    # No import statement: from a hybrid's folder transformers would demand the package.
    return import_module(_package()).flash_attn_varlen_func


def _package() -> str:
    """Version 3 where it is installed and can run, which is on Hopper only; else version 2."""
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    has_3 = is_hopper and find_spec(VERSION_3) is not None
    return VERSION_3 if has_3 else "flash_attn"
