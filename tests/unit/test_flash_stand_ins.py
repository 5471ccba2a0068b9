"""The backends for GPUs on a machine without one: the packages' real signatures and checks, and the
reference's output (tests/varlen_kernel.py). Gradients, windows, documents, whole models."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import library as libraries
from torch._dynamo.backends.common import aot_autograd
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import (
    SDPBackend,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention import varlen as torch_varlen
from transformers import PreTrainedModel, StaticCache

from bosch.attention import dispatch, rates
from bosch.attention.backends import flash, reference, sdpa, varlen
from bosch.attention.cache import CACHE
from bosch.attention.call import NO_MASK, AttentionCall
from bosch.eval.prompt_cache import new_cache
from bosch.hybrid.conversion import deploy
from bosch.sink import Sink, SinkConstants
from tests import efficient_kernel, varlen_kernel
from tests.attention_calls import (
    Case,
    check_against_reference,
    gpu_cases,
    half_sink_cases,
    make_call,
    sink_cases,
    tensors_of,
    with_tensors,
    worst_sink_error,
)
from tests.model_factory import MIXED, logits, packed_positions, random_tokens, tiny_model
from tests.pretended_gpu import Gpu, pretended_gpu

AMPERE, HOPPER = (8, 0), (9, 0)
STEP = 5  # of the cases with sinks every fifth, which meets every kind of them


@pytest.fixture(params=["flash 2", "flash 3", "flash 3 with lse", "varlen", "varlen of torch 2.11"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a backend, on a pretended GPU."""
    with pretended_gpu(monkeypatch, HOPPER if "3" in request.param else AMPERE):
        if "lse" in request.param:
            import flash_attn_interface

            flash_attn_interface.RETURNS_LSE = True
        if "2.11" in request.param:
            monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_kernel.varlen_attn_2_11)
        name = request.param.split()[0]
        assert dispatch.BACKENDS[name].unavailable() is None
        yield name


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with pretended_gpu(monkeypatch) as gpu:
        yield gpu


def test_outputs_and_gradients_are_the_references(backend: str) -> None:
    for case in gpu_cases(most_queries=200):
        reason = check_against_reference(dispatch.BACKENDS[backend], case, "cuda")
        assert reason == (NO_MASK if case.kind in ("left", "right") else None)


def test_sinks_are_merged_by_the_log_sum_exp(backend: str) -> None:
    """varlen with the gradients of all six tensors; flash-attn says that it has none."""
    for case in [*sink_cases()][::STEP]:
        if case.num_queries > 200 or case.dtype != torch.float32:
            continue
        half = replace(case, dtype=torch.bfloat16, head_size=64)
        trains = backend == "varlen"
        reason = check_against_reference(dispatch.BACKENDS[backend], half, "cuda", trains)
        if case.kind in ("left", "right"):
            assert reason == NO_MASK
        elif case.kind == "packed" and case.sink != "static":
            assert reason is None or "packed documents" in reason
        else:
            assert reason is None, case
    trained = make_call(replace(half, kind="plain", sink="static", num_queries=150), "cuda")
    assert ("gradient" in str(flash.supports(trained))) == (trained.sink is not None)
    assert varlen.supports(trained) is None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("module", [varlen, sdpa])
def test_gradients_of_sinks_take_less_than_half_of_what_is_allowed(module: ModuleType) -> None:
    cases = [*half_sink_cases(most_queries=200)][::STEP]
    assert 0 < worst_sink_error(module, cases, "cuda") < 0.5


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gradients", [True, False])
def test_sdpa_merges_sinks_by_the_efficient_kernel(
    dtype: torch.dtype, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stand-in checks what it is given: bias, alignment, a padded log-sum-exp."""
    monkeypatch.setattr(sdpa, "_sink_as_key", None)
    for case in [*sink_cases()][::STEP]:
        if case.num_queries <= 200:
            as_on_gpus = replace(case, dtype=dtype, head_size=64)
            assert check_against_reference(sdpa, as_on_gpus, "cuda", gradients) is None


def test_the_operators_of_torch_take_and_give_what_their_stand_in_does() -> None:
    """The real ones, on tensors without numbers: the same shapes, and outputs in the same order in
    memory."""
    for num_queries, is_causal in ((63, True), (64, False), (1, False)):
        q, k, v = (torch.randn(2, 4, n, 64).bfloat16() for n in (num_queries, 70, 70))
        bias = None if is_causal else torch.zeros(num_queries, 80).bfloat16()[:, :70]
        if bias is not None:
            bias = bias.expand(2, 4, -1, -1)
        found = []
        for device, forward, backward in (
            ("cpu", efficient_kernel.forward, efficient_kernel.backward),
            ("meta", sdpa.efficient_kernel, sdpa.efficient_backward_kernel),
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sdpa, "efficient_kernel", forward)
                patch.setattr(sdpa, "efficient_backward_kernel", backward)
                there = None if bias is None else bias.to(device)
                how = {"bias": there, "is_causal": is_causal, "scaling": 0.125}
                tensors = [x.to(device) for x in (q, k, v)]
                out, lse = sdpa._cuda_forward(*tensors, **how)
                grads = sdpa._cuda_backward(out, *tensors, out, lse, **how)
                assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
                _, whole, *_ = forward(*tensors, there, True, 0.0, is_causal, scale=0.125)
            assert out.transpose(1, 2).is_contiguous()
            found.append([(x.shape, x.dtype) for x in (out, lse, whole, *grads)])
        assert found[0] == found[1]


def model_for_flash() -> PreTrainedModel:
    return tiny_model("qwen3", head_dim=64).to(torch.bfloat16)


def test_whole_models_search_deploy_and_decode(backend: str) -> None:
    """In search mode, as a hybrid, and as a hybrid in chunks with its rolling cache."""
    model, ids = model_for_flash(), random_tokens(1, 200)
    search: dict[str, Any] = {"bosch_mask": MIXED, "bosch_window": 24, "use_cache": False}
    expected = logits(model, ids, bosch_backend="reference", **search)
    hybrid = deploy(model, MIXED, 24)

    def check(found: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.max()))

    check(logits(model, ids, bosch_backend=backend, **search))
    check(logits(hybrid, ids, bosch_backend=backend, use_cache=False))
    for ends in ((0, 23, 24, 100, 199, 200), (0, 150, 151, 200)):
        cache = new_cache(hybrid.config)
        pieces = [ids[:, a:b] for a, b in pairwise(ends)]
        cached = {CACHE: cache, "use_cache": True, "bosch_backend": backend}
        check(torch.cat([logits(hybrid, piece, **cached) for piece in pieces], dim=1))


@pytest.mark.usefixtures("gpu")
@torch.no_grad()
def test_a_static_cache_is_read_by_varlen_as_far_as_it_is_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rows, a window that is passed, a static sink: without a mask, and the reference's logits.
    Earlier versions of torch cannot be told how far."""
    hybrid = deploy(model_for_flash(), MIXED, 24, Sink("static", constants=constants()))
    ids, counts = random_tokens(2, 60), []

    def step_by_step(backend: str | None) -> Tensor:
        cache = StaticCache(hybrid.config, max_cache_len=64)
        more = {CACHE: cache, "use_cache": True, "bosch_backend": backend}
        return torch.cat([logits(hybrid, x, **more) for x in ids.split([9] + [1] * 51, 1)], 1)

    def count(call: AttentionCall, num_seen: Tensor) -> Tensor:
        counts.append(int(num_seen))
        return over_slots(call, num_seen)

    over_slots, expected = varlen._over_slots, step_by_step("reference")
    monkeypatch.setattr(varlen, "_over_slots", count)
    torch.testing.assert_close(step_by_step(None), expected, rtol=0.02, atol=0.02 * 30)
    windowed, full = sum(not all(row) for row in MIXED), sum(any(row) for row in MIXED)
    assert len(counts) == 51 * (windowed + full)
    assert set(counts) == set(range(10, 61))
    assert counts.count(25) == 36 * windowed + full  # the window and its sink, and one position
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_kernel.varlen_attn_2_11)
    torch.testing.assert_close(step_by_step(None), expected, rtol=0.02, atol=0.02 * 30)
    assert len(counts) == 51 * (windowed + full)


def constants() -> SinkConstants:
    generator = torch.Generator().manual_seed(0)
    keys_LGD, values_LGD = torch.randn(2, 3, 4, 64, generator=generator).to(torch.bfloat16)
    return SinkConstants(keys_LGD, values_LGD)


def test_a_training_step_on_packed_documents_has_the_references_gradients(backend: str) -> None:
    hybrid, ids = deploy(model_for_flash(), MIXED, 24).train(), random_tokens(1, 200)
    gradients = []
    for name in (backend, "reference"):
        hybrid.zero_grad()
        packed = {"position_ids": packed_positions(1, 99, 100), "use_cache": False}
        hybrid(ids, labels=ids, bosch_backend=name, **packed).loss.backward()
        gradients.append({n: p.grad.float().clone() for n, p in hybrid.named_parameters()})
    for name, ours in gradients[0].items():
        difference = torch.linalg.norm(ours - gradients[1][name])
        assert difference <= 0.05 * torch.linalg.norm(gradients[1][name]), name


@pytest.mark.usefixtures("gpu")
def test_auto_takes_flash_for_windows_and_documents_and_sdpa_for_the_rest() -> None:
    half = {"dtype": torch.bfloat16, "head_size": 64}
    for case, chosen in (
        (Case(100, 24, **half), "flash"),
        (Case(100, None, kind="packed", **half), "flash"),
        (Case(100, None, **half), "sdpa"),
        (Case(100, 24, kind="left", **half), "sdpa"),
    ):
        assert dispatch.choose(make_call(case, "cuda")) == chosen, case


def test_measured_rates_decide_which_backend_is_asked_first(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the length that is nearest, on this device only."""
    row: dict[str, Any] = {"gradients": False, "documents": False, "sink": False}
    row |= {"window_tokens": 24}
    found = [
        row | {"backend": backend, "tokens": tokens, "calls_per_second": rate}
        for tokens, fastest in ((64, "varlen"), (4096, "flex"))
        for backend, rate in (("flash", 2.0), ("varlen", 1.0), ("flex", 1.0), (fastest, 3.0))
    ]
    # Full attention is measured too, and is no rate of windows.
    full = row | {"backend": "flash", "tokens": 64, "calls_per_second": 9.0, "window_tokens": None}
    monkeypatch.setattr(rates, "FILE", tmp_path / "rates.json")
    rates.write_rates(rates.FILE, "another GPU", found[:1])
    short, long = (
        replace(make_call(Case(num, 24, dtype=torch.bfloat16, head_size=64), "cuda"), sink=None)
        for num in (100, 600)
    )
    with torch.no_grad():
        assert [dispatch.choose(call) for call in (short, long)] == ["flash"] * 2
        rates.write_rates(rates.FILE, gpu.name, [full, *found])
        assert [dispatch.choose(call) for call in (short, long)] == ["varlen", "flex"]
        of_all = replace(long, window_tokens=None)
        assert dispatch.choose(of_all) == "sdpa"  # only windows are measured
    assert dispatch.choose(long) == "flash"  # with gradients nothing was
    assert set(json.loads(rates.FILE.read_text())) == {"another GPU", gpu.name}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("module", [flash, varlen])
def test_what_the_kernels_cannot_do_is_refused(module: ModuleType) -> None:
    def refusal(case: Case) -> str | None:
        reason: str | None = module.supports(make_call(case, "cuda"))
        return reason

    assert "float16" in str(refusal(Case(9, 3)))
    for head_size, refused in ((256, False), (264, True), (20, True)):
        reason = refusal(Case(9, 3, head_size=head_size, dtype=torch.float16))
        assert ("head size" in str(reason)) == refused


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sdpa_computes_the_references_output_on_a_gpu(dtype: torch.dtype) -> None:
    """Its choices for CUDA: a bias in place of a mask after cached keys, repeated heads."""
    plain = (Case(40, None, num_past=100), Case(1, None, num_past=100))
    for case in (*plain, Case(40, 16), Case(40, 16, kind="left")):
        half = replace(case, dtype=dtype, head_size=64)
        assert check_against_reference(sdpa, half, "cuda") is None


@pytest.mark.usefixtures("gpu")
def test_cudnn_computes_whole_chunks_and_trainings_without_a_mask() -> None:
    """Each call that reaches torch's function, with what torch may take for it."""
    calls: list[tuple[int, bool]] = []

    def count(q: Tensor, *others: Any, **named: Any) -> Tensor:
        calls.append((q.shape[2], cuda.cudnn_sdp_enabled()))
        return attention(q, *others, **named)

    attention = functional.scaled_dot_product_attention
    half = {"dtype": torch.bfloat16, "head_size": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", count)
        for case, gradients, allowed in (
            (Case(1, None, num_past=100, **half), False, False),  # decoding
            (Case(1, None, num_past=100, kind="left", **half), False, False),
            (Case(1, 64, num_past=1023, **half), False, False),
            (Case(1, None, num_past=100, **half), True, False),
            (Case(1024, None, **half), False, True),  # evaluation and search
            (Case(1024, None, kind="left", **half), False, True),
            (Case(1000, None, **half), False, False),
            (Case(1024, 64, **half), False, False),  # windows: blocks with masks
            (Case(1000, None, **half), True, True),  # training
            (Case(1024, None, kind="left", **half), True, False),
            (Case(1024, 64, **half), True, None),
        ):
            call = make_call(case, "cuda")
            calls.clear()
            with torch.set_grad_enabled(gradients):
                sdpa.attend(call)
            assert calls, case
            # The first rows of a window are causal, without a mask.
            expected = {allowed} if allowed is not None else {True, False}
            assert {enabled for _, enabled in calls} == expected, (case, gradients, calls)
    assert cuda.cudnn_sdp_enabled()


@pytest.mark.usefixtures("gpu")
def test_whole_chunks_behind_a_past_are_two_calls_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch prefers cuDNN for the past. The kernel is that for CPUs here, with the other
    one's shapes."""
    calls: list[tuple[int, int, bool]] = []

    def by_cpu(q: Tensor, k: Tensor, v: Tensor, *others: Any, scale: float) -> tuple[Tensor, ...]:
        bias, with_lse, dropout, is_causal = others
        assert (bias, with_lse, dropout) == (None, True, 0.0)
        calls.append((q.shape[2], k.shape[2], is_causal))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, dropout, is_causal, scale=scale)
        # As torch's own description of the operator says, on tensors without numbers.
        arguments = *(x.to("meta") for x in (q, k, v)), *others
        described, of_lse, *_ = sdpa_kernel(*arguments, scale=scale)
        assert (described.shape, described.dtype) == (out.shape, out.dtype)
        assert of_lse.dtype == lse.dtype
        return out, lse.reshape(of_lse.shape), torch.zeros(())

    sdpa_kernel = sdpa.cudnn_kernel
    monkeypatch.setattr(sdpa, "cudnn_kernel", by_cpu)
    monkeypatch.setattr(sdpa, "CUDNN_QUERIES", 16)
    asked: list[int] = []
    monkeypatch.setattr(sdpa, "prefers_cudnn", lambda q, k, v, _: not asked.append(k.shape[2]))
    half = {"dtype": torch.bfloat16, "head_size": 64}
    for case, in_two in (
        (Case(32, None, num_past=48, **half), True),
        (Case(16, None, num_past=16, **half), True),
        (Case(16, 4, num_past=16, **half), False),  # a window
        (Case(16, None, num_past=20, **half), False),  # another shape for each chunk
        (Case(20, None, num_past=16, **half), False),
        (Case(16, None, num_past=16, kind="left", **half), False),
    ):
        calls.clear()
        assert check_against_reference(sdpa, case, "cuda", gradients=False) is None
        tokens, past = case.num_queries, case.num_past
        assert calls == ([(tokens, past, False), (tokens, tokens, True)] if in_two else []), case
    assert asked == [48, 16]
    with torch.enable_grad():
        sdpa.attend(make_call(Case(16, None, num_past=16, **half), "cuda"))
    assert asked == [48, 16]  # a training has no past


def test_torch_is_asked_whether_it_prefers_cudnn() -> None:
    q, k = torch.randn(1, 4, 8, 64), torch.randn(1, 2, 24, 64)
    assert not sdpa.prefers_cudnn(q, k, k, 0.125)  # on a CPU


def test_a_compiled_step_of_decoding_keeps_cudnn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with its fast kernel in the place of cuDNN: it is in no graph."""
    monkeypatch.setattr(sdpa, "OTHERS", [SDPBackend.MATH])
    kernels: list[str] = []

    def see(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        kernels.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    call = make_call(Case(1, None, num_past=100, kind="left"))
    for avoids in (False, True):
        monkeypatch.setattr(sdpa, "avoids_cudnn", lambda call, is_causal, avoids=avoids: avoids)
        kernels.clear()
        torch.compiler.reset()
        step = torch.compile(sdpa.attend, fullgraph=True, backend=aot_autograd(fw_compiler=see))
        with torch.no_grad():
            torch.testing.assert_close(step(call), sdpa.attend(call))
        assert any("flash_attention_for_cpu" in name for name in kernels) != avoids
    assert cuda.flash_sdp_enabled()


@pytest.mark.parametrize("sink", ["static", "tokens=4"])
def test_a_compiled_step_with_a_sink_is_one_graph(
    sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the code for CUDA, with the CPU's kernel under it, in the other's order in memory."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *others: Any, scale: float) -> Any:
        out, lse = sdpa._cpu_forward(q, k, v, bias=bias, is_causal=False, scaling=scale)
        padded = functional.pad(lse, (0, -q.shape[2] % 32), value=torch.inf)
        return out.transpose(1, 2).contiguous().transpose(1, 2), padded

    case = Case(1, 16, num_past=30, kind="left", sink=sink, heads_per_group=4)
    call = make_call(case).without_idle_window()
    call = with_tensors(call, [x.detach() for x in tensors_of(call)])
    expected = reference.attend(call)
    monkeypatch.setattr(sdpa, "efficient_kernel", kernel)
    monkeypatch.setattr(sdpa, "_cpu_with_sink", sdpa._cuda_with_sink)
    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(sdpa.attend, backend="aot_eager", fullgraph=True)(call)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("sink", ["none", "static", "tokens=4"])
@pytest.mark.parametrize("heads_of_mask", [1, 8])
def test_a_step_of_decoding_copies_no_keys(
    sink: str, heads_of_mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padded batch: query heads that share keys become rows."""
    case = Case(1, 16, num_past=30, kind="left", dtype=torch.bfloat16, head_size=64, sink=sink)
    call = make_call(case, "cuda").without_idle_window()
    expected = reference.attend(call)
    assert call.mask_BNTS is not None
    if heads_of_mask > 1:
        call = replace(call, mask_BNTS=call.mask_BNTS.expand(-1, heads_of_mask, -1, -1))
    monkeypatch.setattr(sdpa, "repeat_groups", None)
    with torch.no_grad():
        found = sdpa.attend(call)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


def test_dropout_reaches_flash_2_and_is_refused_by_the_others(gpu: Gpu) -> None:
    call = make_call(Case(9, 3, dtype=torch.float16), "cuda")
    dropped = replace(call, dropout=0.5)
    assert flash.supports(dropped) is None
    assert not flash.attend(dropped).any()  # as the stand-in shows that it arrived
    assert "dropout" in str(varlen.supports(dropped))
    gpu.capability = HOPPER
    assert "dropout" in str(flash.supports(dropped))


def test_version_3_becomes_torchs_own_kernel_where_it_can_run(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    """Through torch's own registration; the stand-in's operators are only there to be found."""
    flash.use_3_in_torch()  # on Ampere
    assert current_flash_attention_impl() is None
    gpu.capability = HOPPER
    flash.use_3_in_torch()
    assert current_flash_attention_impl() is None
    assert "torch keeps its own flash kernels: Module 'flash_attn_interface'" in caplog.text
    with libraries._scoped_library("flash_attn_3", "DEF") as library:
        for name in ("fwd", "bwd"):
            library.define(f"{name}(Tensor q) -> Tensor")
        try:
            for _ in range(2):
                flash.use_3_in_torch()
                assert current_flash_attention_impl() == "FA3"
        finally:
            restore_flash_attention_impl()


def test_old_gpus_missing_packages_and_broken_ones_are_named(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert flash.unavailable() is None
    sys.modules.pop("flash_attn")
    (tmp_path / "flash_attn").mkdir()
    broken = tmp_path / "flash_attn" / "__init__.py"
    broken.write_text("raise ImportError('undefined symbol: _ZN3c104cuda')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "does not load (undefined symbol" in str(flash.unavailable())
    # As flash-attn 4 leaves it, when it is there alone: a folder without an __init__.py.
    broken.unlink()
    (tmp_path / "flash_attn" / "cute").mkdir()
    sys.modules.pop("flash_attn", None)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "no flash_attn_varlen_func" in str(flash.unavailable())
    assert dispatch.choose(make_call(Case(9, 3, dtype=torch.float16), "cuda")) == "varlen"
    monkeypatch.delattr(torch_varlen, "varlen_attn")
    assert "torch.nn.attention.varlen" in str(varlen.unavailable())
    gpu.capability = (7, 5)
    for module in (flash, varlen):
        assert "Ampere" in str(module.unavailable())
