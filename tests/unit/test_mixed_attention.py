"""Groups between full and windowed attention: `bosch_gates` in a call of a stock model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bosch.attention.backends import reference
from bosch.attention.call import AttentionCall
from bosch.attention.dispatch import attend
from bosch.attention.search_mode import split_groups
from tests.attention_calls import Case, make_call
from tests.model_factory import MIXED, packed_positions, random_tokens, tiny_model

WINDOW = 8
BRANCHES = [None, 1, 0, None]  # of the four groups: the first and the last compute both


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3").double()


def loss_and_gradients(model: Any, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    ids = random_tokens(2, 60)
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False, **arguments).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


TEXTS = {
    "plain": {},
    "packed": {"position_ids": packed_positions(13, 1, 30, 16)},
    "padded": {"attention_mask": (torch.arange(60) >= 20).long().expand(2, -1)},
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("branches", [None, "as the mask"])
def test_gates_at_0_and_1(model: PreTrainedModel, text: str, branches: str | None) -> None:
    arguments = {"bosch_window": WINDOW, **TEXTS[text]}
    searched = loss_and_gradients(model, bosch_mask=MIXED, **arguments)
    arguments["bosch_gates"] = torch.tensor(MIXED, dtype=torch.float64)
    mixed = loss_and_gradients(model, bosch_mask=branches and MIXED, **arguments)
    torch.testing.assert_close(mixed, searched, rtol=1e-6, atol=1e-9)


def by_definition(call: AttentionCall, gates_G: Tensor, window_tokens: int) -> Tensor:
    """z * full + (1 - z) * window, by the reference backend: (B, T, H, D)."""
    window = reference.attend(replace(call, window_tokens=window_tokens))
    z_H11 = gates_G.repeat_interleave(call.q_BHTD.shape[1] // len(gates_G))[:, None, None]
    return (z_H11 * reference.attend(call) + (1 - z_H11) * window).transpose(1, 2)


@pytest.mark.parametrize("kind", ["plain", "packed", "left"])
@pytest.mark.parametrize("length", [2, 7, 130])
@pytest.mark.parametrize("row", [[None] * 4, BRANCHES, [0, None, 1, 1], [None, None, 0, 0]])
def test_output_and_gradients_by_definition(kind: str, length: int, row: list[int | None]) -> None:
    call = make_call(Case(length, None, kind=kind, dtype=torch.float64))
    gates_G = torch.tensor([0.5 if bit is None else float(bit) for bit in row]).double()
    gates_G = (gates_G + torch.linspace(-0.2, 0.2, 4) * (gates_G == 0.5)).requires_grad_()
    sees_BHT1 = reference.visible(call, WINDOW).any(-1, keepdim=True)
    tensors = (call.q_BHTD, call.k_BGSD, call.v_BGSD, gates_G)
    results = []
    parts = split_groups(call, gates_G, row, WINDOW)
    mixed = parts.join([attend(part).transpose(1, 2) for part in parts.calls])
    for out in (mixed, by_definition(call, gates_G, WINDOW)):
        shown = out.masked_fill(~sees_BHT1.transpose(1, 2), 0)
        weights = torch.linspace(-1, 1, out.numel()).double().view_as(out)
        results.append((shown.detach(), *torch.autograd.grad(shown, tensors, weights)))
    (out, *gradients), (expected, *expected_gradients) = results
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradients[:3], expected_gradients[:3], rtol=1e-6, atol=1e-7)
    # A group that computes one branch leaves its gate without a gradient.
    both_G = torch.tensor([bit is None for bit in row])
    torch.testing.assert_close(gradients[3], expected_gradients[3] * both_G, rtol=1e-6, atol=1e-7)
