"""Compare every attention backend that runs here with the reference: outputs and gradients.

Full attention, windows, packed documents, sinks, and a decoding step. The reference computes the
same numbers in float32. What a backend refuses is skipped; the benchmark fails if one is wrong.
"""
# B batch, H query heads, G kv heads, T queries, S keys, D head size

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks._measure import Row
from benchmarks.attention import Shape, make_call, with_sink
from bosch.backends import reference
from bosch.backends._interface import AttentionCall, Documents
from bosch.hybrid import dispatch

TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}  # shares of the largest number
COLUMNS = {"backend": "backend", "case": "case", "error": "value:.2g", "skipped": "skipped"}


@dataclass(frozen=True)
class Options(Shape):
    length: int = 200  # length of the text, in tokens

    @property
    def title(self) -> str:
        return f"largest error beside the reference, {self.dtype}, {self.place}"


GPU_OPTIONS = Options(length=4096, window=1024, heads=16, groups=8, head_size=128, dtype="bfloat16")
CPU_OPTIONS = Options(window=16, heads=4, groups=2)


def measure(options: Options) -> Iterator[Row]:
    device, wrong = options.start(), []
    calls = list(make_calls(make_call(options.length, True, device, options), options))
    for backend in sorted(dispatch.BACKENDS.keys() - {"reference"}):
        for case, call in calls:
            row: Row = {"name": f"{backend}, {case}", "backend": backend, "case": case}
            row |= {"skipped": dispatch.refusal(backend, call), "value": None}
            if row["skipped"] is None:
                row["value"] = largest_error(backend, call)
                if not row["value"] <= TOLERANCES[options.dtype]:
                    wrong.append(f"{row['name']} by {row['value']:.2g}")
            yield row | {"unit": "of the largest number"}
    if wrong:
        raise ArithmeticError(f"not what the reference computes: {', '.join(wrong)}")


def make_calls(full: AttentionCall, options: Options) -> Iterator[tuple[str, AttentionCall]]:
    windowed, tokens = replace(full, window_tokens=options.window), options.length
    documents = Documents(((0, 1, tokens // 3, tokens),), full.q_BHTD.device)
    yield "full", full
    yield "window", windowed
    yield "documents", replace(full, documents=documents)
    yield "window and documents", replace(windowed, documents=documents)
    for sink in ("static", "tokens=4"):
        made = with_sink(windowed, sink).sink
        assert made is not None
        fixed = {"k_BGND": made.k_BGND.detach(), "v_BGND": made.v_BGND.detach()}
        yield f"window, sink {sink}", replace(windowed, sink=replace(made, **fixed))
    last_BHTD = full.q_BHTD[:, :, -1:].detach().requires_grad_()
    yield "decode", replace(full, q_BHTD=last_BHTD)
    yield "decode, window", replace(windowed, q_BHTD=last_BHTD).without_idle_window()


def largest_error(backend: str, call: AttentionCall) -> float:
    """Of the output and of the gradients of queries, keys and values."""
    inputs = (call.q_BHTD, call.k_BGSD, call.v_BGSD)
    exact: Any = [x.detach().float().requires_grad_() for x in inputs]
    names = ("q_BHTD", "k_BGSD", "v_BGSD")
    widened = replace(call, **dict(zip(names, exact, strict=True)))
    if (sink := call.sink) is not None:
        of_sink = {"k_BGND": sink.k_BGND.float(), "v_BGND": sink.v_BGND.float()}
        widened = replace(widened, sink=replace(sink, **of_sink))

    def results(out_BHTD: Tensor, of: Any) -> list[Tensor]:
        weights = torch.linspace(-1, 1, out_BHTD.numel(), device=out_BHTD.device)
        weights = weights.view_as(out_BHTD).to(call.q_BHTD.dtype).to(out_BHTD.dtype)
        found = torch.autograd.grad(out_BHTD, of, weights)
        return [x.detach().float() for x in (out_BHTD, *found)]

    ours = results(dispatch.attend(call, backend), inputs)
    theirs = results(reference.attend(widened), exact)
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
