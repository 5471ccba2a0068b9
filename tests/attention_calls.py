"""Attention calls of awkward shapes, and the comparison of a backend with the reference on them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from bosch.attention.backends import reference
from bosch.attention.call import AttentionCall, Documents, SinkKeys
from bosch.attention.sink_keys import sink_keys
from bosch.sink import Sink


@dataclass(frozen=True)
class Case:
    num_queries: int
    window_tokens: int | None
    num_groups: int = 4
    num_past: int = 0
    kind: str = "plain"  # plain, left or right (padded), packed
    batch: int = 2
    heads_per_group: int = 2
    dtype: torch.dtype = torch.float32
    head_size: int = 16
    sink: str = "none"


def lengths(window_tokens: int) -> list[int]:
    # The longest has many blocks of queries (sdpa.py) and some queries more. Kernels change their
    # own blocks at about 200 and 800 queries, which one window shows as well as three.
    longest = 1000 if window_tokens == 64 else 300
    return sorted({1, 7, 63, max(window_tokens - 1, 1), window_tokens, window_tokens + 1, longest})


def thin_cases() -> Iterator[Case]:
    """Every length with every window, each other dimension at least once."""
    for window in (1, 16, 64):
        for length in lengths(window):
            yield Case(length, window)
            if length > 1:
                yield Case(length, window, kind="packed")
                yield Case(length, window, kind="left")
        yield Case(63, window, num_groups=1)
        yield Case(130, window, num_groups=8, kind="right")
        yield Case(200, window, num_past=5)
        yield Case(200, window, num_past=500, kind="left")
        yield Case(1, window, num_past=window + 3)
        yield Case(130, window, dtype=torch.bfloat16)
        yield Case(130, window, dtype=torch.bfloat16, kind="packed")
        yield Case(65, window, heads_per_group=1, batch=1)
    for kind in ("plain", "left", "packed"):
        yield Case(63, None, kind=kind)
    yield Case(40, None, num_past=100)
    yield Case(40, None, num_past=100, heads_per_group=1)
    yield Case(1, None, num_past=100)
    yield Case(1, None, num_past=100, kind="left")


def gpu_cases(most_queries: int = 1_000) -> Iterator[Case]:
    """In half precision, with the head sizes that models have."""
    for case in thin_cases():
        if case.num_queries <= most_queries:
            yield replace(case, dtype=torch.bfloat16, head_size=64)
    yield Case(300, 64, head_size=128, num_groups=8, dtype=torch.float16)


def sink_cases() -> Iterator[Case]:
    for case in thin_cases():
        if case.window_tokens is not None:
            yield replace(case, sink="static")
            yield replace(case, sink=f"tokens={min(case.window_tokens, 4)}")


def half_sink_cases(most_queries: int = 1_000) -> Iterator[Case]:
    """Sinks in bf16, where the sums that their gradients are show how they are added up."""
    for case in sink_cases():
        if case.num_queries <= most_queries:
            for head_size in (16, 64):
                yield replace(case, dtype=torch.bfloat16, head_size=head_size)


def make_call(case: Case, device: str = "cpu", seed: int = 0) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)

    def random(num_heads: int, num_tokens: int) -> Tensor:
        x = torch.randn(case.batch, num_heads, num_tokens, case.head_size, generator=generator)
        return x.to(device, case.dtype).requires_grad_()

    num_keys = case.num_past + case.num_queries
    num_heads = case.num_groups * case.heads_per_group
    q_BHTD = random(num_heads, case.num_queries)
    k_BGSD, v_BGSD = random(case.num_groups, num_keys), random(case.num_groups, num_keys)
    call = AttentionCall(
        q_BHTD, k_BGSD, v_BGSD, scaling=case.head_size**-0.5, window_tokens=case.window_tokens
    )
    if case.kind == "packed":
        # A document of one token, and different borders in each row.
        rows = [
            sorted({0, 1, case.num_queries // (b + 2), case.num_queries}) for b in range(case.batch)
        ]
        documents = Documents(tuple(map(tuple, rows)), torch.device(device))
        call = replace(call, documents=documents)
    elif case.kind != "plain":
        call = replace(call, mask_BNTS=padding_mask(case, num_keys).to(device))
    if case.sink != "none":
        call = replace(call, sink=make_sink(case, call, generator))
    return call


def make_sink(case: Case, call: AttentionCall, generator: torch.Generator) -> SinkKeys | None:
    assert case.window_tokens is not None
    module = SimpleNamespace(window_sink=Sink.parse(case.sink))
    if case.sink == "static":
        module.window_sink_key, module.window_sink_value = (
            torch.randn(case.num_groups, case.head_size, generator=generator).to(call.q_BHTD)
            for _ in range(2)
        )
    sink = sink_keys(module, call, case.window_tokens, case.num_past)
    if sink is None:
        return None
    k_BGND, v_BGND = (x.detach().requires_grad_() for x in (sink.k_BGND, sink.v_BGND))
    return replace(sink, k_BGND=k_BGND, v_BGND=v_BGND)


def padding_mask(case: Case, num_keys: int) -> Tensor:
    """Causal, and in every second row a third of the keys are padding."""
    is_real_BS, third = torch.ones(case.batch, num_keys, dtype=torch.bool), num_keys // 3
    padding = slice(0, third) if case.kind == "left" else slice(num_keys - third, num_keys)
    is_real_BS[::2, padding] = False
    causal_TS = torch.ones(case.num_queries, num_keys, dtype=torch.bool).tril(case.num_past)
    return causal_TS & is_real_BS[:, None, None, :]


def tensors_of(call: AttentionCall) -> list[Tensor]:
    sink = [] if call.sink is None else [call.sink.k_BGND, call.sink.v_BGND]
    return [call.q_BHTD, call.k_BGSD, call.v_BGSD, *sink]


def with_tensors(call: AttentionCall, tensors: list[Tensor]) -> AttentionCall:
    q_BHTD, k_BGSD, v_BGSD, *of_sink = tensors
    sink = call.sink
    if sink is not None:
        sink = replace(sink, k_BGND=of_sink[0], v_BGND=of_sink[1])
    return replace(call, q_BHTD=q_BHTD, k_BGSD=k_BGSD, v_BGSD=v_BGSD, sink=sink)


def check_against_reference(
    backend: ModuleType, case: Case, device: str = "cpu", gradients: bool = True
) -> str | None:
    """Output and gradients of a backend against the reference; the reason of one that refuses."""
    call = make_call(case, device).without_idle_window()
    if not gradients:
        call = with_tensors(call, [x.detach() for x in tensors_of(call)])
    reason: str | None = backend.supports(call)
    if reason is not None:
        return reason
    for name, ours, expected, bounds in compared(backend, case, call, gradients):
        torch.testing.assert_close(
            ours, expected, **bounds, msg=lambda m, n=name: f"{case} {n}: {m}"
        )
    return None


def worst_sink_error(backend: ModuleType, cases: Iterable[Case], device: str = "cpu") -> float:
    """The largest error of a sink's gradients, as a share of what the contract allows."""
    worst = 0.0
    for case in cases:
        call = make_call(case, device).without_idle_window()
        if call.sink is None or backend.supports(call) is not None:
            continue
        for name, ours, expected, bounds in compared(backend, case, call, True):
            if "sink" in name:
                allowed = bounds["atol"] + bounds["rtol"] * expected.float().abs()
                error = (ours.float() - expected.float()).abs() / allowed
                worst = max(worst, float(error.max()))
    return worst


def compared(
    backend: ModuleType, case: Case, call: AttentionCall, gradients: bool
) -> Iterator[tuple[str, Tensor, Tensor, dict[str, float]]]:
    """The output and each gradient: its name, the backend's, the reference's in more exact numbers,
    and the allowed rtol and atol."""
    exact = torch.promote_types(case.dtype, torch.float32)
    widened = [x.detach().to(exact).requires_grad_(gradients) for x in tensors_of(call)]
    # The output of a query that sees nothing (padding) is not defined.
    sees_something = reference.visible(call, call.window_tokens).any(-1, keepdim=True)
    tolerances = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
    tolerance = (tolerances | {torch.float64: 1e-10})[case.dtype]
    results = []
    for attend, made in ((backend.attend, call), (reference.attend, with_tensors(call, widened))):
        out = attend(made).masked_fill(~sees_something, 0)
        assert out.dtype == made.q_BHTD.dtype
        weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(case.dtype)
        grads = ()
        if gradients:
            grads = torch.autograd.grad(out, tensors_of(made), weights.to(out.dtype))
        results.append([x.to(case.dtype) for x in (out, *grads)])
    names = ("output", "dq", "dk", "dv", "dk of the sink", "dv of the sink")
    for name, ours, expected in zip(names, *results, strict=False):
        # The gradients of a sink are sums over all queries, and their rounding grows with them.
        size = max(1.0, float(expected.abs().max())) if "sink" in name else 1.0
        yield name, ours, expected, {"rtol": tolerance, "atol": tolerance * size}


def visible_counts(
    backend: ModuleType, num_tokens: int, window_tokens: int, device: str, dtype: torch.dtype
) -> Tensor:
    """How many keys each query sees, from the output: q = 0 weighs all alike, V is the identity."""
    v_BGSD = torch.eye(num_tokens, device=device, dtype=dtype)[None, None]
    zeros = torch.zeros_like(v_BGSD)
    call = AttentionCall(zeros, zeros, v_BGSD, scaling=1.0, window_tokens=window_tokens)
    return (backend.attend(call) != 0).sum(-1).flatten()
