"""What every backend must do: give the reference's outputs and gradients, for odd shapes too."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bosch.attention import dispatch
from bosch.attention.backends import reference
from bosch.attention.call import AttentionCall
from bosch.run.errors import UserError
from tests.attention_calls import (
    Case,
    check_against_reference,
    half_sink_cases,
    make_call,
    sink_cases,
    thin_cases,
    visible_counts,
    worst_sink_error,
)

BACKENDS = sorted(dispatch.BACKENDS)
# Each backend, and every how many of the cases: a step prime to their pattern meets every kind.
# Torch traces each call of flex anew. `make slow` takes all cases.
every_backend = pytest.mark.parametrize(
    ("name", "step"),
    [
        *((name, 13 if name == "flex" else 5) for name in BACKENDS),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in BACKENDS),
    ],
)


@pytest.fixture(autouse=True)
def flex_by_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as torch computes it where it does not compile: the same formula, with
    gradients, which torch refuses on a CPU only because its kernel for CPUs has none."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(dispatch.BACKENDS["flex"], "has_gradients", lambda device: True)


def runnable(name: str) -> ModuleType:
    """A backend that can run here, on the CPU, without compiling for half a minute."""
    backend = dispatch.BACKENDS[name]
    reason = backend.unavailable()
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    if backend is reference:
        pytest.skip("the others are compared with the reference")
    return backend


@every_backend
def test_outputs_and_gradients_are_the_references(name: str, step: int) -> None:
    """Sinks in float64, where their gradients can be told from rounding."""
    backend, doubled = runnable(name), {torch.float32: torch.float64}
    with_sinks = [replace(case, dtype=doubled.get(case.dtype, case.dtype)) for case in sink_cases()]
    for case, gradients in product([*thin_cases(), *with_sinks][::step], (True, False)):
        assert check_against_reference(backend, case, gradients=gradients) is None


@every_backend
def test_gradients_of_sinks_take_less_than_half_of_what_is_allowed(name: str, step: int) -> None:
    """In bf16; .2 of it, measured. Added up in bf16 they took 1.3, in one case of all."""
    cases = list(half_sink_cases(most_queries=200))[::step]
    assert 0 < worst_sink_error(runnable(name), cases) < 0.5


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sink_as_one_more_key_is_the_same(step: int) -> None:
    """As with dropout, and where no kernel says its log-sum-exp; here a dropout that drops nothing
    leads there."""
    for case in [*sink_cases()][::step]:
        call = make_call(replace(case, dtype=torch.float64)).without_idle_window()
        expected, sees = reference.attend(call), reference.visible(call, call.window_tokens)
        found = dispatch.BACKENDS["sdpa"].attend(replace(call, dropout=1e-30))
        hidden = ~sees.any(-1, keepdim=True)
        torch.testing.assert_close(found.masked_fill(hidden, 0), expected.masked_fill(hidden, 0))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window_tokens", [1, 8, 64])
def test_a_window_of_w_shows_w_keys(name: str, window_tokens: int) -> None:
    backend = dispatch.BACKENDS[name] if name == "reference" else runnable(name)
    counts = visible_counts(backend, 64, window_tokens, "cpu", torch.float32)
    assert counts.tolist() == [min(i + 1, window_tokens) for i in range(64)]


def test_a_named_backend_that_cannot_is_an_error_with_its_reason() -> None:
    call = make_call(Case(7, 3))
    assert dispatch.choose(call) == "sdpa"
    with pytest.raises(UserError, match=r"varlen.*CUDA"):
        dispatch.choose(call, "varlen")
    with pytest.raises(UserError, match="nonesuch"):
        dispatch.choose(call, "nonesuch")
    visible_BNTS = torch.ones(1, call.q_BHTD.shape[1], 7, 7, dtype=torch.bool).tril()
    with pytest.raises(UserError, match=r"reference.*one mask for all heads"):
        dispatch.choose(replace(call, mask_BNTS=visible_BNTS), "reference")


def test_a_backend_of_a_setting_is_checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(call: AttentionCall) -> str | None:
        return "it has no gradients" if call.needs_grad else None

    narrow = SimpleNamespace(unavailable=lambda: None, supports=supports)
    cpu = torch.device("cpu")
    check = partial(dispatch.check_backend, "train.attention", device=cpu, dtype=torch.float32)
    check("auto")
    check("sdpa", trains=True, packed=True, padded=True)
    with pytest.raises(UserError, match=r"train.attention spda.*'sdpa'"):
        check("spda")
    with pytest.raises(UserError, match=r"train.attention varlen.*CUDA"):
        check("varlen")
    monkeypatch.setitem(dispatch.BACKENDS, "narrow", narrow)
    check("narrow")
    with pytest.raises(UserError, match=r"train.attention narrow.*gradients"):
        check("narrow", trains=True)


@pytest.mark.parametrize("window_tokens", [None, 3])
@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_on_a_gpu_kernels_do_all_but_plain_attention(window_tokens: int | None, kind: str) -> None:
    call = make_call(Case(7, window_tokens, kind=kind))
    assert dispatch.by_priority(call) == ["sdpa"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_gpu = replace(call, q_BHTD=torch.empty(call.q_BHTD.shape, device="cuda"))
    is_plain_full = window_tokens is None and kind == "plain"
    expected = ["sdpa"] if is_plain_full else ["flash", "varlen", "sdpa"]
    if window_tokens is not None:  # behind sdpa, and so never, where it was not measured
        expected.append("flex")
    assert dispatch.by_priority(on_gpu) == expected


def test_a_file_that_does_not_load_breaks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "some_backends"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "fine.py").touch()
    (folder / "needy.py").write_text("import a_missing_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    loaded, broken = dispatch.load_backends("some_backends")
    assert list(loaded) == ["fine"]
    assert list(broken) == ["needy"]
    assert "a_missing_package" in broken["needy"]
    assert len(caplog.records) == 1
    monkeypatch.setattr(dispatch, "BROKEN", broken)
    with pytest.raises(UserError, match=r"eval.attention needy.*a_missing_package"):
        dispatch.check_backend("eval.attention", "needy", torch.device("cpu"), torch.float32)


def test_the_kernel_for_cpus_runs_on_the_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """After cached keys, in float32, on a device that is neither the CPU nor CUDA."""
    sdpa = dispatch.BACKENDS["sdpa"]
    name = "_scaled_dot_product_flash_attention_for_cpu"
    monkeypatch.setattr(torch.ops.aten, name, lambda *arguments, **named: pytest.fail("called"))
    call = replace(make_call(Case(40, None, num_past=100), "meta"), mask_BNTS=None)
    with torch.inference_mode():
        assert sdpa.attend(call).shape == call.q_BHTD.shape
