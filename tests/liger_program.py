"""Liger's kernels, run by Triton's interpreter, against torch, in fp32:
`TRITON_INTERPRET=1 python tests/liger_program.py`.

A separate program, because Triton chooses its interpreter for the whole process.
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
from bosch.hybrid.conversion import deploy
from bosch.training.loss import Lesson, head_loss, install_kernels, model_loss
from bosch.training.parallel import choose_kernels
from tests.model_factory import random_tokens, tiny_model


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


def loss_and_gradients(
    model: Any, inputs: dict[str, Any], labels: Tensor, scale: float
) -> dict[str, Tensor]:
    loss = model_loss(model, inputs, labels, scale)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def compare_models() -> None:
    """Norms, MLPs and loss of each family; other models keep torch's classes."""
    kernels, _ = choose_kernels("auto", torch.device("cpu"))
    assert kernels == "liger", kernels
    ids = random_tokens(2, 11)
    inputs, labels = {"input_ids": ids}, torch.roll(ids, -1, 1)
    labels[:, -1] = IGNORED
    for family in ("qwen3", "llama", "olmo2"):
        plain: Any = tiny_model(family, num_hidden_layers=1, initializer_range=0.1)
        plain = deploy(plain, [[1, 0, 1, 0]], 4).train()
        ours = copy.deepcopy(plain)
        install_kernels(plain, "torch")
        expected = loss_and_gradients(plain, inputs, labels, 1 / 20)
        install_kernels(ours, kernels)
        found = loss_and_gradients(ours, inputs, labels, 1 / 20)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        for module in (ours.model.norm, ours.model.layers[0].mlp):
            assert module.forward.__func__.__module__.startswith("liger_kernel"), module
        other: Any = tiny_model(family, num_hidden_layers=1)
        assert "liger" not in type(other.model.norm).__module__


def compare_divergences() -> None:
    """From a teacher, of six tokens, the last of which has no target."""
    lesson = Lesson(torch.randn(6, 64), torch.randn(500, 64) * 0.05, temperature=2.0)
    hidden = torch.randn(1, 6, 64, requires_grad=True)
    weight = (torch.randn(500, 64) * 0.05).requires_grad_()
    labels = torch.randint(500, (1, 6))
    labels[0, -1] = IGNORED
    results = []
    for kernels in ("torch", "liger"):
        value = head_loss(hidden, weight, labels, 1 / 20, kernels, lesson)
        results.append([value.detach(), *torch.autograd.grad(value, (hidden, weight))])
    for expected, found in zip(*results, strict=True):
        difference = torch.linalg.norm(found - expected)
        assert difference <= 1e-5 * torch.linalg.norm(expected), (found, expected)


if __name__ == "__main__":
    torch.manual_seed(0)
    fix_the_interpreter()
    compare_models()
    compare_divergences()
