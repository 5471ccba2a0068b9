"""The GPU backends against the reference: outputs, gradients, windows, documents, whole models."""

import copy
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bosch.attention import dispatch
from bosch.attention.backends import sdpa
from bosch.hybrid.conversion import deploy
from tests.attention_calls import (
    Case,
    check_against_reference,
    gpu_cases,
    half_sink_cases,
    make_call,
    sink_cases,
    thin_cases,
    visible_counts,
    worst_sink_error,
)
from tests.model_factory import MIXED, generate_anew, logits, random_tokens, same_mask, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # of compilers: findings on a GPU are rare
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

every_backend = pytest.mark.parametrize("name", sorted(set(dispatch.BACKENDS) - {"reference"}))


def runnable(name: str) -> ModuleType:
    backend = dispatch.BACKENDS[name]
    reason = backend.unavailable()
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return backend


@every_backend
def test_outputs_and_gradients_are_the_references(name: str) -> None:
    backend, refused, computed = runnable(name), set(), 0
    half = {"dtype": torch.bfloat16, "head_size": 128}
    chunks = [Case(1024, None, num_past=past, **half) for past in (1024, 2048)]  # sdpa: by cuDNN
    for case in [*gpu_cases(), *chunks]:
        reason = check_against_reference(backend, case, device="cuda")
        refused.add(reason)
        computed += reason is None
    assert computed
    assert all(reason is None or "mask" in reason for reason in refused), refused


@every_backend
def test_sinks_are_the_references(name: str) -> None:
    backend = runnable(name)
    cases = [replace(c, dtype=torch.bfloat16, head_size=64) for c in sink_cases()]
    # Within the window there is none.
    with_sinks = [case for case in cases if make_call(case, "cuda").sink is not None]
    assert None in {check_against_reference(backend, case, device="cuda") for case in with_sinks}


@every_backend
def test_gradients_of_sinks_take_less_than_half_of_what_is_allowed(name: str) -> None:
    assert worst_sink_error(runnable(name), half_sink_cases(), "cuda") < 0.5


def test_fp32_is_the_references() -> None:
    """Only sdpa computes it, and evaluations of small models need it."""
    for case in thin_cases():
        if case.dtype == torch.float32:
            assert check_against_reference(runnable("sdpa"), case, device="cuda") is None


@every_backend
@pytest.mark.parametrize("window_tokens", [1, 8, 64])
def test_a_window_of_w_shows_w_keys(name: str, window_tokens: int) -> None:
    counts = visible_counts(runnable(name), 64, window_tokens, "cuda", torch.bfloat16)
    assert counts.tolist() == [min(i + 1, window_tokens) for i in range(64)]


def model_on_gpu() -> PreTrainedModel:
    # The flash kernels need bf16 and a head size that is a multiple of 8.
    return tiny_model("qwen3", head_dim=64).to("cuda", torch.bfloat16)


def test_a_full_mask_is_the_stock_model_to_the_bit() -> None:
    """In whole chunks. Of other lengths cuDNN, which torch may choose, computes nothing of ours."""
    model, ids = model_on_gpu(), random_tokens(2, sdpa.CUDNN_QUERIES).cuda()
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("sdpa")
    ours = logits(model, ids, bosch_mask=same_mask(1, model), bosch_window=64, use_cache=False)
    assert torch.equal(ours, logits(stock, ids, use_cache=False))


@every_backend
def test_search_and_deploy_agree_on_every_backend(name: str) -> None:
    runnable(name)
    model, ids = model_on_gpu(), random_tokens(1, 300).cuda()
    search = {"bosch_mask": MIXED, "bosch_window": 64, "use_cache": False}
    searched, reference = (
        logits(model, ids, bosch_backend=backend, **search) for backend in (name, "reference")
    )
    atol = 0.1 * reference.abs().max().item()
    torch.testing.assert_close(searched, reference, rtol=0.05, atol=atol)
    hybrid = logits(deploy(model, MIXED, 64), ids, bosch_backend=name, use_cache=False)
    torch.testing.assert_close(hybrid, searched, rtol=0.05, atol=atol)


def test_generating_gives_the_tokens_of_recomputation() -> None:
    model, ids = deploy(tiny_model("qwen3").cuda(), MIXED, 16), random_tokens(1, 90).cuda()
    kinds: Any = [{"cache_implementation": kind} for kind in ("offloaded", "static")]
    for how in ({}, {"prefill_chunk_size": 64}, *kinds):
        out = model.generate(ids, max_new_tokens=8, do_sample=False, **how)
        assert torch.equal(out, generate_anew(model, ids, 8)), how
