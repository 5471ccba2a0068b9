"""Compares Liger's kernels, run by Triton's interpreter, with torch: `TRITON_INTERPRET=1 python
tests/liger_program.py`.

Prints each family whose loss and gradients agree, and whose other models keep torch's classes. It
is a separate program because Triton chooses its interpreter for the whole process.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parents[1]))

from bosch.data.loader import IGNORED
from bosch.hybrid.models import deploy
from bosch.training.kernels import choose_kernels, install_kernels
from bosch.training.loss import install_loss_head, model_loss
from tests.model_factory import random_tokens, tiny_model

TOLERANCE = 1e-6


def fix_the_interpreter() -> None:
    """Fix two bugs of triton's interpreter: numbers reach a kernel as Python floats, which have no
    `to`, and libdevice's rsqrt does not compute anything."""
    from liger_kernel.ops import rms_norm

    convert = interpreter._implicit_cvt

    def convert_floats_too(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = convert_floats_too
    rms_norm.rsqrt = lambda value: tl.math.rsqrt(value)  # looked up when a kernel runs


def loss_and_gradients(model: Any, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    loss = model_loss(model, {"input_ids": ids}, labels, 1 / 20)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def main() -> None:
    fix_the_interpreter()
    kernels, _ = choose_kernels("auto", torch.device("cpu"))
    assert kernels == "liger", kernels
    ids = random_tokens(2, 11)
    labels = torch.roll(ids, -1, 1)
    labels[:, -1] = IGNORED
    for family in ("qwen3", "llama"):
        plain: Any = tiny_model(family, num_hidden_layers=1, initializer_range=0.1)
        plain = deploy(plain, [[1, 0, 1, 0]], 4).train()
        ours = copy.deepcopy(plain)
        install_loss_head(plain, "torch")
        expected = loss_and_gradients(plain, ids, labels)
        install_kernels(ours, kernels)
        install_loss_head(ours, kernels)
        for name, value in loss_and_gradients(ours, ids, labels).items():
            torch.testing.assert_close(
                value,
                expected[name],
                rtol=TOLERANCE,
                atol=TOLERANCE,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        for module in (ours.model.norm, ours.model.layers[0].mlp):
            assert module.forward.__func__.__module__.startswith("liger_kernel"), module
        other: Any = tiny_model(family, num_hidden_layers=1)
        assert "liger" not in type(other.model.norm).__module__
        print(family)
    print("equal")


if __name__ == "__main__":
    main()
