"""Which kernels compute norms, MLPs and the loss: Liger's on GPUs, torch's elsewhere."""

import os
import sys
from importlib.util import find_spec
from typing import Any

import torch

from bosch.hybrid.models import family_of
from bosch.run.errors import UserError


def choose_kernels(asked: str, device: torch.device) -> tuple[str, str]:
    """(liger or torch, why). What was asked for by name and cannot run is an error."""
    reason = None
    if find_spec("liger_kernel") is None:
        reason = "liger-kernel is not installed"
    # Triton's interpreter runs the kernels anywhere: for tests, thousands of times as slow.
    elif device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        reason = f"its kernels are for GPUs, and this device is a {device.type}"
    if asked == "liger" and reason is not None:
        raise UserError(f"train.kernels liger cannot run here: {reason}. Use auto or torch.")
    if asked != "auto":
        return asked, "as asked"
    return ("torch", reason) if reason is not None else ("liger", "this device is a GPU")


def install_kernels(model: Any, kernels: str) -> None:
    """Liger's RMSNorm and SwiGLU in this one model of one of our families.

    Liger also puts its classes in the place of transformers' own, for every model to come: those go
    back, so that all evaluations of a run compute with the same kernels. Its rotary embeddings are
    left out, which it can change for a whole process alone. The loss is not here: training/loss.py
    calls its kernel.
    """
    if kernels != "liger":
        return
    from liger_kernel import transformers as liger

    family = family_of(model.config)
    model_type = family.plain_config_class.model_type
    module = sys.modules[family.plain_model_class.__module__]
    own = dict(vars(module))
    apply = getattr(liger, f"apply_liger_kernel_to_{model_type}", None)
    if apply is None:
        raise UserError(f"Liger has no kernels for {model_type}; set train.kernels to torch.")
    apply(
        rope=False,
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        model=model,
    )
    vars(module).update(own)
