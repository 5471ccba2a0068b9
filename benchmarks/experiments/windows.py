"""Which kernel is the fastest for windows, by length: FlexAttention, varlen, flash-attn, sdpa."""
# B batch, H query heads, G kv heads, T queries, S keys, D head size

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks._measure import Row, short, time_in_turns
from benchmarks.experiments._points import K, Point, Points
from bosch.attention import dispatch
from bosch.attention.call import AttentionCall, Documents
from bosch.attention.sink_keys import sink_keys
from bosch.sink import Sink
from bosch.training.metrics import visible_pairs

MINUTES = 2.5
ROUNDS = 5
FLEX, SDPA, STATIC = "flex", "sdpa", " static"
MOST_COMPARED = 4 * K  # tokens of texts over which kernels are compared
CLOSE = 0.05  # of outputs and gradients in bf16
SLOW_ON_GPUS = {"reference", "sdpa"}  # with windows, several times
Attention = Callable[[AttentionCall], Tensor]


def points(device: torch.device) -> Points:
    for tokens in (4 * K, 16 * K, 64 * K) if device.type == "cuda" else (256, 512):
        for needs_grad in (False, True):
            for documents in (1, 8):
                title = title_of(tokens, needs_grad, documents)
                measure = partial(compare, title, tokens, needs_grad, documents, device)
                yield Point(title, measure)


def title_of(tokens: int, needs_grad: bool, documents: int) -> str:
    direction = "forward and backward" if needs_grad else "forward"
    many = f", {documents} documents" if documents > 1 else ""
    return f"window, {short(tokens)}{many}, {direction}"


def compare(
    title: str, tokens: int, needs_grad: bool, documents: int, device: torch.device
) -> list[Row]:
    """Each kernel beside full attention over as many tokens of one document, which is what the
    dense model would compute at best."""
    full = make_call(tokens, needs_grad, device)
    window = K if device.type == "cuda" else 16
    windowed = replace(full, window_tokens=window)
    with_sink = replace(windowed, sink=static_sink(windowed, window))
    if documents > 1:
        ends = tuple(tokens * n // documents for n in range(documents + 1))
        apart = Documents((ends,), device)
        windowed = replace(windowed, documents=apart)
        with_sink = replace(windowed, sink=static_sink(windowed, window))
    sides = {"full": timed(dispatch.attend, full)}
    # An independent implementation where its table of all pairs fits into memory, else one that was
    # compared with it there: a kernel that computed something else would be fast for nothing.
    judge = SDPA if tokens <= MOST_COMPARED else FLEX
    expected = dict[str, list[Tensor]]()
    for kind, call in (("", windowed), (STATIC, with_sink)):
        if dispatch.refusal(judge, call) is None:
            with suppress(Exception):  # its own failure is told below
                expected[kind] = outputs_of(partial(dispatch.attend, backend=judge), call)
    differences, failed = dict[str, float](), dict[str, str]()
    for backend in dict.fromkeys([*dispatch.by_priority(windowed), FLEX]):
        # They would take the minutes of the others, and nobody runs them there.
        if backend in SLOW_ON_GPUS and device.type == "cuda":
            continue
        attention = partial(dispatch.attend, backend=backend)
        for kind, call in (("", windowed), (STATIC, with_sink)):
            name = backend + kind
            if dispatch.refusal(backend, call) is not None:
                continue
            try:
                found = outputs_of(attention, call)
            except Exception as error:  # of one kernel; the others may run
                failed[name] = f"{type(error).__name__}: {error}"[:300]
                continue
            sides[name] = timed(attention, call)
            if kind in expected:
                differences[name] = largest_difference(found, expected[kind])
                if not differences[name] <= CLOSE:  # also NaN
                    failed[name] = f"differs from {judge} by {differences[name]:.2g} of the largest"
    seconds = {name: median(s) for name, s in time_in_turns(sides, ROUNDS, device).items()}
    direction = "forward and backward" if needs_grad else "forward"
    many = ", documents" if documents > 1 else ""
    broken = [name for name in failed if name not in seconds]
    kind_of_call = {"gradients": needs_grad, "documents": documents > 1}
    return [
        {"name": f"{title}, {name}", "kernel": name, "failed": failed[name], **kind_of_call}
        for name in broken
    ] + [
        {
            "name": f"{title}, {name}",
            "what": f"a window by {name}{many}, {direction}",
            "tokens": tokens,
            "value": 1 / found,
            "unit": "calls/s",
            "dense": 1 / seconds["full"],
            "kernel": name,
            "title": title,
            **kind_of_call,
            "difference": differences.get(name),
            **({"failed": failed[name]} if name in failed else {}),
            "window_tokens": window,
            "flops": flops_of(windowed),
            "full_kernel": dispatch.choose(full),
            "full_flops": flops_of(full),
        }
        for name, found in seconds.items()
        if name != "full"
    ]


def outputs_of(attention: Attention, call: AttentionCall) -> list[Tensor]:
    """The output, and the gradients where the call has them."""
    output = attention(call)
    if not call.needs_grad:
        return [output]
    inputs = (call.q_BHTD, call.k_BGSD, call.v_BGSD)
    return [output.detach(), *torch.autograd.grad(output.sum(), inputs)]


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """As a share of the largest number."""
    pairs = zip(found, expected, strict=True)
    # torch's maximum is NaN where one of the numbers is.
    return float(torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max())


def flops_of(call: AttentionCall) -> int:
    """As a training counts them; a sink adds next to nothing."""
    _, heads, tokens, size = call.q_BHTD.shape
    lengths = [tokens] if call.documents is None else call.documents.lengths[0]
    pairs = sum(visible_pairs(length, call.window_tokens) for length in lengths)
    return 4 * (3 if call.needs_grad else 1) * size * heads * pairs


def make_call(tokens: int, needs_grad: bool, device: torch.device) -> AttentionCall:
    """The windowed groups of a layer of Qwen3-1.7B at .75."""
    on_gpu = device.type == "cuda"
    heads, groups, size = (12, 6, 128) if on_gpu else (2, 1, 32)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        x_BHTD = torch.randn(1, heads, tokens, size, generator=generator)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        return x_BHTD.to(device, dtype).requires_grad_(needs_grad)

    return AttentionCall(random(heads), random(groups), random(groups), scaling=size**-0.5)


def static_sink(call: AttentionCall, window_tokens: int) -> Any:
    module = SimpleNamespace(  # what attention modules have of it
        window_sink=Sink("static"),
        window_sink_key=call.k_BGSD[0, :, 0].detach(),
        window_sink_value=call.v_BGSD[0, :, 0].detach(),
    )
    return sink_keys(module, call, window_tokens, num_past=0)


def timed(attention: Attention, call: AttentionCall) -> Callable[[], object]:
    if call.needs_grad:
        inputs = (call.q_BHTD, call.k_BGSD, call.v_BGSD)
        return lambda: torch.autograd.grad(attention(call).sum(), inputs)
    return torch.inference_mode()(lambda: attention(call))


def rates(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """As the package keeps them (bosch/attention/rates.py): by them `auto` chooses, and the time of
    a run is computed."""
    # One that computes something else is fast for nothing at every length.
    wrong = {kind_of(row) for row in rows if row.get("failed") and row.get("kernel")}
    measured = [row for row in rows if row.get("kernel") and row.get("value")]
    measured = [row for row in measured if kind_of(row) not in wrong]
    found = [rate(row, row["kernel"], row["window_tokens"], row["value"]) for row in measured]
    # Full attention was measured beside each of them.
    beside = {(row["tokens"], row["gradients"]): row for row in measured if not row["documents"]}
    full = [rate(row, row["full_kernel"], None, row["dense"]) for row in beside.values()]
    return found + full


def kind_of(row: Row) -> tuple[Any, ...]:
    return row["kernel"], row["gradients"], row["documents"]


def rate(row: Row, kernel: str, window_tokens: int | None, value: float) -> dict[str, Any]:
    flops = row["full_flops"] if window_tokens is None else row["flops"]
    return {
        "backend": kernel.removesuffix(STATIC),
        "tokens": row["tokens"],
        "window_tokens": window_tokens,
        "gradients": row["gradients"],
        "documents": row["documents"],
        "sink": kernel.endswith(STATIC),
        "calls_per_second": value,
        "flops_per_second": float(f"{value * flops:.5g}"),
    }


def conclude(rows: Sequence[Row]) -> list[str]:
    """The fastest kernel of each case, of those without a sink, what a sink costs, and whether all
    compute the same."""
    sentences = []
    for title in dict.fromkeys(row["title"] for row in rows):
        here = {row["kernel"]: row for row in rows if row["title"] == title}
        plain = {kernel: row for kernel, row in here.items() if not kernel.endswith(STATIC)}
        best = max(plain.values(), key=lambda row: row["value"])
        share = best["value"] / best["dense"]
        parts = [f"{title}: {best['kernel']} is the fastest, {share:.2f} of full attention's speed"]
        for kernel, row in plain.items():
            if (sunk := here.get(kernel + STATIC)) is not None:
                cost = row["value"] / sunk["value"]
                parts.append(f"with a static sink {kernel} takes {cost:.2f} times as long")
        sentences.append("; ".join(parts))
    differences = dict[str, float]()
    for row in rows:
        if row.get("difference") is not None:
            differences[row["kernel"]] = max(differences.get(row["kernel"], 0), row["difference"])
    if differences:
        found = ", ".join(f"{kernel} {most:.2g}" for kernel, most in differences.items())
        judges = f"{SDPA} or {FLEX}"
        sentences.append(f"largest difference from {judges}, of outputs and gradients: {found}")
    return sentences
