"""Time windowed against full causal attention in one layer, for each attention backend.

By default one head of size 64 in one CPU thread. Full attention (by sdpa) and the window on each
backend run in turns at each length, once the forward pass alone and once with the backward pass.
What a sink costs:

    python -m benchmarks attention --window 128 --heads 9 --groups 3 --sinks none static tokens=4
"""
# B batch, H query heads, G kv heads, T queries, S keys, D head size

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

from benchmarks._measure import DeviceOptions, Row, short, speedup, time_in_turns
from bosch.attention import dispatch
from bosch.attention.call import AttentionCall
from bosch.attention.sink_keys import sink_keys
from bosch.plugins import load_plugin
from bosch.run.errors import UserError, is_out_of_memory
from bosch.run.progress import say
from bosch.sink import Sink

FULL = "full"
TITLE = "{heads} heads of {head_size}, window {window}, {dtype}, {place}"
COLUMNS = {"tokens": "tokens:,", "pass": "pass", "backend": "backend", "sink": "sink"}
COLUMNS |= {"full, seconds": "full_seconds:.5f", "window, seconds": "window_seconds:.5f"}
COLUMNS |= {"speed-up": "value:.2f"}


@dataclass(frozen=True)
class Options(DeviceOptions):
    lengths: tuple[int, ...] = (1024, 4096, 16_384)  # lengths of the text, in tokens
    window: int = 256  # window size in tokens
    heads: int = 1  # query heads
    groups: int = 1  # KV heads
    head_size: int = 64  # size of a head
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # number format
    sinks: tuple[str, ...] = ("none",)  # kinds of sink, each beside the others
    backends: tuple[str, ...] | None = None  # None: sdpa on a CPU, all that run here on a GPU
    rounds: int = 7  # how often each side is timed


def measure(options: Options) -> Iterator[Row]:
    device = options.start()
    for needs_grad, tokens in product((False, True), options.lengths):
        what = "forward and backward" if needs_grad else "forward"
        full = make_call(tokens, needs_grad, device, options)
        windowed = replace(full, window_tokens=options.window)
        # Full attention over as many tokens is what the window replaces: every side is compared
        # with it.
        sides = {FULL: timed(partial(dispatch.attend, full), full)}
        backends = options.backends or dispatch.by_priority(windowed)
        for backend, sink in product(backends, options.sinks):
            load_plugin(
                "bosch.attention.backends", backend
            )  # an error if there is none of this name
            call = with_sink(windowed, sink)
            side = timed(partial(dispatch.attend, call, backend), call)
            try:
                side()
                sides[f"{backend}, sink {sink}"] = side
            except Exception as error:  # the backend refuses, or memory is short
                known = isinstance(error, UserError | torch.OutOfMemoryError)
                if not (known or is_out_of_memory(error)):
                    raise
                say(f"attention: skipped {backend} at {short(tokens)} tokens: {error}")
        seconds = time_in_turns(sides, options.rounds, device)
        for side_name in list(sides)[1:]:
            # The first side is the full attention itself.
            backend, _, sink = side_name.partition(", sink ")
            shown = backend if options.sinks == ("none",) else side_name
            full_times, times = seconds[FULL], seconds[side_name]
            row: Row = {
                "name": f"{short(tokens)} tokens, window {options.window}, {shown}, {what}",
                "value": speedup(full_times, times),
                "unit": "x faster than full",
            }
            row |= {"tokens": tokens, "window": options.window, "backend": backend, "sink": sink}
            row |= {"pass": what, "full_seconds": median(full_times)}
            yield row | {"window_seconds": median(times)}


def make_call(
    tokens: int, needs_grad: bool, device: torch.device, options: Options
) -> AttentionCall:
    # Drawn on the CPU: a GPU's generator would give other numbers.
    generator, dtype, tensors = torch.Generator().manual_seed(0), getattr(torch, options.dtype), []
    for num_heads in (options.heads, options.groups, options.groups):  # queries, keys, values
        x_BHTD = torch.randn(1, num_heads, tokens, options.head_size, generator=generator)
        tensors.append(x_BHTD.to(device, dtype).requires_grad_(needs_grad))
    q_BHTD, k_BGSD, v_BGSD = tensors
    return AttentionCall(q_BHTD, k_BGSD, v_BGSD, scaling=options.head_size**-0.5)


def with_sink(call: AttentionCall, sink: str) -> AttentionCall:
    """Constants, or first tokens of the text."""
    module = SimpleNamespace(  # what attention modules have of it
        window_sink=Sink.parse(sink),
        window_sink_key=call.k_BGSD[0, :, 0],
        window_sink_value=call.v_BGSD[0, :, 0],
    )
    assert call.window_tokens is not None
    return replace(call, sink=sink_keys(module, call, call.window_tokens, num_past=0))


def timed(attend: Callable[[], Tensor], call: AttentionCall) -> Callable[[], object]:
    """The function to time: forward, and backward too if the call needs gradients."""
    if call.needs_grad:
        inputs = (call.q_BHTD, call.k_BGSD, call.v_BGSD)
        return lambda: torch.autograd.grad(attend().sum(), inputs)
    return torch.inference_mode()(attend)
