"""The loss without stored logits, against linear + cross_entropy; and Liger's kernels, run by
Triton's interpreter, against torch's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import bosch.training.loss
from bosch.data.loader import IGNORED
from bosch.kernels import choose_kernels, fuse_forward
from bosch.run.errors import UserError
from bosch.training.loss import head_loss, install_kernels, model_loss
from tests.model_factory import random_tokens, tiny_model

CPU = torch.device("cpu")


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(3, 11, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    labels = torch.randint(50, (3, 11))
    labels[torch.rand(3, 11) < 0.3] = IGNORED
    return hidden, weight, labels


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float) -> Tensor:
    logits = F.linear(hidden, weight).float().flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") * scale


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("rows", [1, 7, 33, 100])
def test_chunks_add_up_to_the_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bosch.training.loss, "CHUNK_ROWS", rows)
    hidden, weight, labels = make_inputs()
    ours = gradients(head_loss(hidden, weight, labels, 0.25, "torch"), hidden, weight)
    plain = gradients(plain_loss(hidden, weight, labels, 0.25), hidden, weight)
    for mine, theirs in zip(ours, plain, strict=True):
        if rows >= 33:  # one chunk: the same products in the same order
            assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_gradient_of_a_bf16_weight_is_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bosch.training.loss, "CHUNK_ROWS", 1)  # a chunk for each row
    hidden = torch.ones(1, 600, 16, dtype=torch.bfloat16)
    weight = torch.zeros(50, 16, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1, 600, dtype=torch.long)
    (grad,) = torch.autograd.grad(head_loss(hidden, weight, labels, 1.0, "torch"), weight)
    # 600 rows, each -0.98 for the target. Summed in bf16 it would stand still at 256.
    assert grad[0].float().mean() == pytest.approx(-0.98 * 600, rel=0.01)


def test_head_returns_logits_when_no_labels_are_set() -> None:
    model = tiny_model("qwen3")
    ids = random_tokens(2, 9)
    before = model(ids).logits
    install_kernels(model, "torch")
    assert torch.equal(model(ids).logits, before)
    labels = torch.roll(ids, -1, 1)
    loss = model_loss(model, {"input_ids": ids}, labels, 1.0)
    plain = F.cross_entropy(before.flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.detach() == pytest.approx(float(plain.detach()), rel=1e-6)
    assert torch.equal(model(ids).logits, before)


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    hidden, weight, labels = make_inputs()

    def work(learns: bool) -> tuple[int, Tensor]:
        weight.requires_grad_(learns)
        with FlopCounterMode(display=False) as counter:
            loss = head_loss(hidden, weight, labels, 1.0, "torch")
            (grad,) = torch.autograd.grad(loss, hidden)
        return counter.get_total_flops(), grad

    (learned, grad), (frozen, same) = work(True), work(False)
    assert torch.equal(grad, same)
    assert 3 * frozen == 2 * learned


def test_kernels_are_chosen_by_device_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert choose_kernels("auto", CPU)[0] == "torch"
    assert choose_kernels("auto", CPU)[1]  # says why
    with pytest.raises(UserError, match=r"train\.kernels liger"):
        choose_kernels("liger", CPU)
    pytest.importorskip("liger_kernel")
    assert choose_kernels("auto", torch.device("cuda"))[0] == "liger"
    assert choose_kernels("torch", torch.device("cuda")) == ("torch", "as set")


def test_on_a_cpu_models_keep_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model("qwen3")
    fuse_forward(model)
    assert not any("forward" in vars(module) for module in model.modules())


def run_with_the_interpreter(*parts: str) -> None:
    """In its own process, since Triton chooses its interpreter when it is imported."""
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    program = Path(__file__).parents[1] / "liger_program.py"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, str(program), *parts]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [*parts]


@pytest.mark.slow
def test_liger_kernels_compute_what_torch_computes() -> None:
    run_with_the_interpreter("models", "forward")


@pytest.mark.slow
def test_liger_kernels_take_real_sizes_and_weights_as_fully_shard_hands_them_over() -> None:
    run_with_the_interpreter("loss", "divergence", "sharded")
