"""Liger's fused kernels for norms, MLPs and rotary embeddings, in place of torch's: for each a
single one that reads its input once, where torch runs up to twelve.

A training asks for them by `train.kernels`. Models that search and evaluation load have them on
every GPU where Liger is installed (`fuse_forward`).
"""

import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from bosch.hybrid.models import family_of
from bosch.run.errors import UserError
from bosch.run.memory import is_old_gpu
from bosch.run.progress import say_once

# The function of a family's module, by which its attention rotates queries and keys; and the name
# of the fused one as an attribute of an attention that has it.
ROTATE = "apply_rotary_pos_emb"


def choose_kernels(setting: str, device: torch.device) -> tuple[str, str]:
    """(liger or torch, the reason). Setting liger where it cannot run is an error."""
    reason = None
    if find_spec("liger_kernel") is None:
        reason = "liger-kernel is not installed (pip install liger-kernel)"
    # Triton's interpreter runs the kernels anywhere, thousands of times slower. Tests use it.
    elif device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        reason = f"Liger's kernels need a GPU, and this device is a {device.type}"
    elif device.type == "cuda" and is_old_gpu():
        reason = "Liger's kernels need a GPU of compute capability 8.0 or more"
    if setting == "liger" and reason is not None:
        raise UserError(f"train.kernels liger cannot run here: {reason}. Use auto or torch.")
    if setting != "auto":
        return setting, "as set"
    return ("torch", reason) if reason is not None else ("liger", "this device is a GPU")


def fuse_forward(model: PreTrainedModel) -> None:
    """Let a model of our families that was loaded to compute forward use Liger's kernels where
    they can run. With gradients it computes as before: for a method that measures them, Liger's
    backward would overwrite what the forward has kept."""
    kernels, reason = choose_kernels("auto", model.device)
    if kernels != "liger":
        if model.device.type == "cuda":
            say_once(f"torch computes norms and rotary embeddings, slower: {reason}")
        return
    fuse(model)


def fuse(model: PreTrainedModel) -> None:
    """The same on any device: where they cannot run, their launches can be counted."""
    if not is_compared(model):
        return
    before: dict[Any, Callable[..., Any]] = {m: m.forward for m in model.modules()}
    fuse_blocks(model)
    for module, plain in before.items():
        if module.forward != plain:
            module.forward = partial(_forward, plain, module.forward)
    core: Any = model.base_model
    for layer in core.layers:
        _fuse_rotation(layer.self_attn)


def fuse_blocks(model: PreTrainedModel) -> None:
    """Use Liger's RMSNorm and SwiGLU in this one model, but not its rotary embeddings, which Liger
    can only replace for the whole process."""
    from liger_kernel import transformers as liger

    if not is_compared(model):
        return
    family = family_of(model.config)
    module = sys.modules[family.plain_model_class.__module__]
    apply = getattr(liger, f"apply_liger_kernel_to_{family.plain_config_class.model_type}")
    # Liger also replaces transformers' own classes for all later models. Restored, so that all
    # evaluations of a run use the same kernels.
    before = dict(vars(module))
    unused = dict.fromkeys(("rope", "cross_entropy", "fused_linear_cross_entropy"), False)
    # It does not ask which function an existing MLP has. And not the experts of a MoE: their kernel
    # multiplies matrices, float32 perhaps as TF32 (10 bits), and Triton's interpreter, by which the
    # test compares the others, cannot run it.
    has_experts = hasattr(model.config, "num_experts")
    mlps = model.config.hidden_act in ("silu", "swish") and not has_experts
    apply(rms_norm=True, swiglu=mlps, model=model, **unused)
    vars(module).update(before)


def is_compared(model: PreTrainedModel) -> bool:
    """Whether Liger's kernels may replace the blocks of this model; a line says if not."""
    family = family_of(model.config)
    # Others rotate or normalize in ways of their own, which Liger's kernels would not notice.
    is_compared: bool = getattr(family, "kernels_compared", False)
    if not is_compared:
        model_type = family.plain_config_class.model_type
        say_once(f"torch computes the blocks of {model_type}: no test compares fused kernels")
    return is_compared


def rotation_of(attention: nn.Module) -> Callable[..., Any]:
    """The function that rotates queries and keys in an attention's forward. A fused one does it in
    place, so the two must not share memory."""
    of_family = getattr(sys.modules[type(attention).__module__], ROTATE)
    rotate: Callable[..., Any] = getattr(attention, ROTATE, of_family)
    return rotate


def _fuse_rotation(attention: Any) -> None:
    """The forward looks its function up among the globals of its module, which all models share.
    So this attention gets the same code with globals of its own."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb as rotate

    plain = inspect.unwrap(type(attention).forward)
    if ROTATE not in plain.__code__.co_names:
        say_once(f"torch computes the rotary embeddings: {type(attention).__name__} is not known")
        return
    own = {**plain.__globals__, ROTATE: rotate}
    fused = FunctionType(plain.__code__, own, plain.__name__, plain.__defaults__, plain.__closure__)
    fused.__kwdefaults__ = plain.__kwdefaults__
    setattr(attention, ROTATE, rotate)
    attention.forward = partial(_forward, attention.forward, fused.__get__(attention))


# For partials of bound methods, which become those of the copy's modules when a model is copied.
def _forward(plain: Callable[..., Any], fused: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return (plain if torch.is_grad_enabled() else fused)(*args, **named)
