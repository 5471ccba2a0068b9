"""A machine with one GPU, pretended on the CPU: what our code does there, but for the kernels.

    with pretended_gpu(monkeypatch) as gpu:
        ...

Inside, tensors of the CPU say that they are on a CUDA device, and what is asked for on one is made
on the CPU. flash-attn is there as stand-ins, torch's varlen_attn too (tests/varlen_kernel.py), and
its memory-efficient attention (tests/efficient_kernel.py).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode

from bosch.attention import dispatch
from bosch.attention.backends import sdpa
from bosch.attention.backends import varlen as varlen_backend
from tests import efficient_kernel
from tests.varlen_kernel import flash_backward, varlen_attn

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
STAND_INS = Path(__file__).parent / "stand_ins"
PACKAGES = ("flash_attn", "flash_attn_interface")


@dataclass
class Gpu:
    """May be changed inside. `calls`: of functions that a CPU has no use for."""

    capability: tuple[int, int]
    free_bytes: int = 2**34
    name: str = "NVIDIA H100 80GB HBM3"

    def __post_init__(self) -> None:
        self.calls: list[str] = []


class CallItCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == torch.Tensor.device.__get__:
            return CUDA
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func == torch.Tensor.pin_memory:
            return args[0].clone()
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args = tuple(on_cpu(x) for x in args)
        named = {name: on_cpu(x) for name, x in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **named)


def on_cpu(value: Any) -> Any:
    is_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return CPU if is_cuda else value


def has_efficient_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """As torch answers for a GPU with bf16."""
    return dtype != torch.float64 and head_size % 8 == 0


@contextmanager
def pretended_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (8, 0)
) -> Iterator[Gpu]:
    gpu = Gpu(capability)
    real = {name: sys.modules.pop(name) for name in PACKAGES if name in sys.modules}
    monkeypatch.syspath_prepend(STAND_INS)
    answers: dict[str, Callable[[], Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda: gpu.capability,
        "get_device_name": lambda: gpu.name,
        "mem_get_info": lambda: (gpu.free_bytes, 2**36),
        "max_memory_allocated": lambda: 3 * 10**9,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer())
    for name in ("set_device", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name: gpu.calls.append(name))
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(varlen_backend, "backward_kernel", flash_backward)
    monkeypatch.setattr(sdpa, "efficient_kernel", efficient_kernel.forward)
    monkeypatch.setattr(sdpa, "efficient_backward_kernel", efficient_kernel.backward)
    monkeypatch.setattr(sdpa, "has_efficient_kernel", has_efficient_kernel)
    monkeypatch.setattr(dispatch, "_availability", {})
    try:
        with CallItCuda():
            yield gpu
    finally:
        for name in PACKAGES:
            sys.modules.pop(name, None)
        sys.modules.update(real)
