"""Which kernels compute norms, MLPs, rotary embeddings and the loss: Liger's on GPUs, torch's
elsewhere."""

import os
from importlib.util import find_spec
from typing import Any

import torch

from bosch.errors import UserError
from bosch.hybrid.models import PREFIX


def choose_kernels(asked: str, device: torch.device) -> tuple[str, str]:
    """(liger or torch, why). What was asked for by name and cannot run is an error."""
    reason = _why_not_liger(device)
    if asked == "torch":
        return "torch", "as asked"
    if asked == "liger":
        if reason is not None:
            raise UserError(f"train.kernels liger cannot run here: {reason}. Use auto or torch.")
        return "liger", "as asked"
    return ("torch", reason) if reason is not None else ("liger", "this device is a GPU")


def _why_not_liger(device: torch.device) -> str | None:
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    # Triton's interpreter runs the kernels anywhere: for tests, thousands of times as slow.
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"its kernels are for GPUs, and this device is a {device.type}"
    return None


def install_kernels(model: Any, kernels: str) -> None:
    """Liger's RMSNorm, SwiGLU and rotary embeddings in a model of one of our families.

    The rotary function is looked up in the family's transformers module, so that it changes for
    every model of this process. The loss is not here: training/loss.py calls its kernel.
    """
    if kernels != "liger":
        return
    from liger_kernel import transformers as liger

    family = model.config.model_type.removeprefix(PREFIX)
    apply = getattr(liger, f"apply_liger_kernel_to_{family}")
    apply(
        rope=True,
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        model=model,
    )
