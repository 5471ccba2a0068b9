"""Operators that one decoded token launches, a layer: what decides its speed on a GPU, where each
one costs as much as it does on a CPU, and hardly more for a large model than for a small one.

Of the dense model and of hybrids at .75, over a dynamic cache and over a static one: operators as
they are, with Liger's kernels as evaluations have them on GPUs (on a CPU these are counted and left
out), and compiled (`cache_implementation="static"` of `generate` compiles on GPUs). Views and
allocations launch nothing and are not counted; the embedding and the head are shared out.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, StaticCache

from benchmarks import _measure
from benchmarks._measure import DeviceOptions, Row, set_hybrid
from bosch.attention.cache import CACHE
from bosch.kernels import fuse
from bosch.training.rehearsal import as_hybrid

TITLE = "{model}, {place}: operators of one token"
COLUMNS = {"": "name", "operators a layer": "value:.1f", "compiled": "graphs"}
SINKS = ("none", "static", "tokens=4")
WAYS = ("dynamic", "dynamic, Liger", "static", "static, Liger", "static, compiled")
NO_LAUNCH = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}
NO_LAUNCH |= {"aten::item", "aten::_local_scalar_dense"}
PROMPT, STEPS = 64, 300
VIEWS = (
    "view reshape expand transpose permute slice select unsqueeze squeeze t as_strided detach "
    "split split_with_sizes alias unflatten flatten _unsafe_view _reshape_alias lift_fresh "
    "resolve_conj resolve_neg unfold numpy_T mT expand_as to contiguous narrow chunk result_type"
).split()


@dataclass(frozen=True)
class Options(DeviceOptions):
    model: str = "mini"  # a known model or a model folder, as for latency
    window: int = 16  # window size in tokens
    sinks: tuple[str, ...] = SINKS  # of the hybrids
    ways: tuple[str, ...] = WAYS  # caches, and whether steps are compiled


def measure(options: Options) -> Iterator[Row]:
    device = options.start()
    config = _measure.read_shape(options.model)
    make = partial(_measure.make_model, device=device, dtype=torch.float32)
    shapes = (config, "sdpa"), (as_hybrid(config, ratio=0.0, window_tokens=1), "bosch")
    (dense, hybrid), fused = ([make(s, attention=a) for s, a in shapes] for _ in range(2))
    for model in fused:
        if any("Liger" in way for way in options.ways):
            fuse(model)
    sides: list[tuple[str, Any, Any]] = [("dense", dense, fused[0])]
    sides += [(f".75, sink {sink}", hybrid, fused[1]) for sink in options.sinks]
    for name, *both in sides:
        if both[0] is hybrid:
            for model in both:
                set_hybrid(model, 0.75, options.window, name.rpartition(" ")[2])
        for way in options.ways:
            count, graphs = operators(both["Liger" in way], way, device)
            row: Row = {"name": f"{name}, {way} cache", "unit": "operators a layer"}
            yield row | {"value": count / config.num_hidden_layers, "graphs": graphs}


@torch.no_grad()
def operators(model: Any, way: str, device: torch.device) -> tuple[int, int | None]:
    """Of one token, and how many graphs were compiled for it and 300 tokens before it."""
    cache: Any = DynamicCache(config=model.config)
    if way.startswith("static"):
        cache = StaticCache(model.config, max_cache_len=PROMPT + STEPS + 8)
    leaves_out = "Liger" in way and device.type == "cpu"
    with without_triton() if leaves_out else nullcontext(list[object]()) as others:
        found, graphs = profile_token(model, way, device, cache, others)
    return count_launches(found, device) + len(others), graphs


def profile_token(
    model: Any, way: str, device: torch.device, cache: Any, others: list[object]
) -> tuple[profile, int | None]:
    ids = _measure.random_ids(model.config, PROMPT, device)
    arguments: dict[str, Any] = {"use_cache": True, CACHE: cache, "logits_to_keep": 1}
    model(ids, **arguments)
    call, num_steps = model.forward, 2
    if "compiled" in way:
        torch.compiler.reset()
        counters.clear()
        # The kernels that it makes are events of a profile too.
        torch._inductor.config.cpp.enable_kernel_profile = True
        call, num_steps = torch.compile(call, fullgraph=True, dynamic=False), STEPS
    token = ids[:, :1].clone()
    for _ in range(num_steps):
        call(token, **arguments)
    graphs = counters["stats"]["unique_graphs"] if "compiled" in way else None
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    others.clear()  # those of the tokens before
    with profile(activities=activities) as found:
        call(token, **arguments)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return found, graphs


@contextmanager
def without_triton() -> Iterator[list[object]]:
    """Kernels of triton are left out inside, and noted."""
    from triton.runtime.jit import KernelInterface

    launched: list[object] = []

    def launch(kernel: Any, grid: object) -> Any:  # in `kernel[grid](...)`
        return lambda *_, **__: launched.append(kernel)

    with patch.object(KernelInterface, "__getitem__", launch):
        yield launched


def count_launches(found: profile, device: torch.device) -> int:
    events = found.events() or []
    if device.type == "cuda":
        return sum(event.device_type == DeviceType.CUDA for event in events)
    return sum(map(is_launch, events))


def is_launch(event: Any) -> bool:
    """An operator that computes and is not part of another one, or a kernel that was compiled."""
    if "cpp_fused" in event.name:
        return True
    name = event.name.removeprefix("aten::")
    if name == event.name or name in VIEWS or event.name in NO_LAUNCH:
        return False
    return event.cpu_parent is None or not is_part_of_launch(event.cpu_parent)


def is_part_of_launch(event: Any) -> bool:
    parent = event.cpu_parent
    return is_launch(event) or (parent is not None and is_part_of_launch(parent))
