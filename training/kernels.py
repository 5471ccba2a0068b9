"""Chooses and installs the kernels for norms, MLPs and the loss: Liger's on GPUs, else torch's."""

import os
from importlib import import_module
from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from bosch.hybrid.models import PREFIX
from bosch.run.errors import UserError
from bosch.run.progress import say


def choose_kernels(setting: str, device: torch.device) -> tuple[str, str]:
    """(liger or torch, the reason). Setting liger where it cannot run is an error."""
    reason = None
    if find_spec("liger_kernel") is None:
        reason = "liger-kernel is not installed (pip install liger-kernel)"
    # Triton's interpreter runs the kernels anywhere, thousands of times slower. Tests use it.
    elif device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        reason = f"Liger's kernels need a GPU, and this device is a {device.type}"
    if setting == "liger" and reason is not None:
        raise UserError(f"train.kernels liger cannot run here: {reason}. Use auto or torch.")
    if setting != "auto":
        return setting, "as set"
    return ("torch", reason) if reason is not None else ("liger", "this device is a GPU")


def install_kernels(model: PreTrainedModel, kernels: str) -> None:
    """Use Liger's RMSNorm and SwiGLU in this one model, which is of one of our families.

    Liger also replaces transformers' own classes for all later models. We restore them, so that all
    evaluations of a run use the same kernels. Liger's rotary embeddings are not used, since Liger
    can only replace them for the whole process. training/loss.py calls the kernel for the loss.
    """
    if kernels != "liger":
        return
    from liger_kernel import transformers as liger

    family = model.config.model_type.removeprefix(PREFIX)
    apply = getattr(liger, f"apply_liger_kernel_to_{family}", None)
    if apply is None:
        say(f"Liger has no kernels for the family {family}; torch computes its norms and MLPs")
        return
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    before = dict(vars(module))
    apply(
        rope=False,
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        model=model,
    )
    vars(module).update(before)
