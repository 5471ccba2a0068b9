"""How much memory a training step takes on GPUs, found on a CPU in a minute: the step runs through
our own start, shards, loop, loss and optimizer as one rank of many, with torch's fake tensors,
which have a shape and no content, and its fake process group, which sends nothing.

Attention is that of torch's varlen_attn, whose memory is that of every flash kernel, and each row
is one document. Liger's Python code runs with its kernels left out. Experts are computed together
(by torch's grouped_mm or by Liger), which takes the same memory however tokens are routed. Blocks
are not compiled.

Not included: CUDA itself, NCCL, fragmentation, and a block that is gathered while another one is
still in use; MARGIN_GB is for these. With offloading, one block's fp32 weights on their way are
not counted.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grads_with_norm_
from transformers import PretrainedConfig, PreTrainedModel

from bosch.backends import varlen
from bosch.config import TrainConfig
from bosch.data.loader import Batch
from bosch.hybrid import dispatch
from bosch.hybrid.models import hybrid_config
from bosch.run.errors import UserError
from bosch.run.progress import say
from bosch.training.checkpoint_content import TrainState, describe_state
from bosch.training.live_memory import LiveMemory
from bosch.training.loop import add_gradients, split
from bosch.training.model_start import build_on_meta, make_empty
from bosch.training.optimizer import gradient_norm, make_optimizer, trained_parameters
from bosch.training.parallel import Switches, World, choose_device, choose_switches, whole
from bosch.training.schedule import choose_micro_batch
from bosch.training.teacher import Teacher, build_dense
from bosch.training.trained import choose_trained

KINDS = ("weights", "gradients", "optimizer", "activations", "loss")
COLUMNS = {  # of a table of rehearsals
    "GPUs": "gpus",
    "kernels": "kernels",
    "at once": "micro_batch_sequences",
    "peak, GB": "value:.1f",
    **{kind: f"{kind}:.1f" for kind in KINDS},
    "fits": "fits",
    "CPU s": "cpu_seconds:.0f",
}
KERNELS = ("torch", "liger")
MARGIN_GB = 6.0
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@dataclass(frozen=True)
class Plan:
    """A training to rehearse."""

    model: PretrainedConfig
    settings: TrainConfig
    seq_len: int
    num_gpus: int
    kernels: str  # torch or liger
    teacher: PretrainedConfig | None = None  # None: the model itself, without windows

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise UserError(f"cannot rehearse on {self.num_gpus} GPUs; name at least 1.")
        positions = self.model.max_position_embeddings
        if self.seq_len > positions:
            raise UserError(
                f"sequences of {self.seq_len:,} tokens do not fit the model's {positions:,} "
                "positions; make them shorter."
            )
        if self.kernels == "liger" and find_spec("liger_kernel") is None:
            raise UserError("Liger's kernels cannot be rehearsed: liger-kernel is not installed.")
        self.micro_batch  # noqa: B018  refuses a batch that the ranks cannot share

    @property
    def micro_batch(self) -> int:
        return choose_micro_batch(self.settings, self.seq_len, self.num_gpus, "cuda")


@dataclass(frozen=True)
class Rehearsal:
    """What a plan would take."""

    peak: Mapping[str, int]  # bytes by kind on one GPU, at the moment when it holds most
    cpu_seconds: float  # for the rehearsal itself

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    def fits(self, memory_gb: float) -> bool:
        return self.peak_bytes / 1e9 + MARGIN_GB <= memory_gb

    def row(self, plan: Plan, memory_gb: float) -> dict[str, Any]:
        """For a table with COLUMNS."""
        return {
            "gpus": plan.num_gpus,
            "kernels": plan.kernels,
            "micro_batch_sequences": plan.micro_batch,
            "value": self.peak_bytes / 1e9,
            "unit": "GB",
            **{kind: self.peak[kind] / 1e9 for kind in KINDS},
            "memory_gb": memory_gb,
            "fits": "yes" if self.fits(memory_gb) else "NO",
            "cpu_seconds": self.cpu_seconds,
        }


def rehearse(plan: Plan) -> Rehearsal:
    """In a process of its own: a process has one process group, and GPUs would change kernels."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_hide_gpus) as pool:
        return pool.submit(rehearse_here, plan).result()


def _hide_gpus() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def rehearse_here(plan: Plan) -> Rehearsal:
    begin, live = time.process_time(), LiveMemory()
    switches = replace(choose_switches(plan.settings, CUDA), compile=False)
    model = build_on_meta(plan.model)  # fake parameters on the meta device cannot leave it
    choose_trained(model, plan.settings.trained, plan.settings.lora_rank)
    distills = plan.settings.objective == "distill"
    dense = build_dense(plan.teacher or plan.model, switches) if distills else None
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_ranks(plan.num_gpus) as world, _without_kernels(plan.kernels), fake, live:
        make_step(live, plan, world, switches, model, dense)
    peak = live.peak()
    return Rehearsal({kind: peak[kind] for kind in KINDS}, time.process_time() - begin)


def make_step(
    live: LiveMemory,
    plan: Plan,
    world: World,
    switches: Switches,
    model: PreTrainedModel,
    dense: PreTrainedModel | None = None,
) -> None:
    """A step of training (training/loop.py) and what saves its result."""
    settings, micro = plan.settings, plan.micro_batch
    if settings.attention in ("auto", "flash", "varlen"):
        settings = replace(settings, attention="rehearsed")
    on_host = switches.cpu_offload
    with live.making("weights"):
        model = make_empty(model, world, switches, plan.kernels)
        teacher = dense and Teacher(dense, world, switches, plan.kernels, settings, model)
    parameters = trained_parameters(model)
    live.name("weights", model.parameters(), on_host)
    for module in model.modules():  # those that fully_shard has gathered
        module.register_forward_pre_hook(
            lambda module, _: live.name("weights", module.parameters(recurse=False))
        )
    head = model.get_submodule("lm_head")
    head.register_forward_pre_hook(lambda *_: setattr(live, "kind", "loss"))
    head.register_forward_hook(lambda *_: setattr(live, "kind", "activations"))

    optimizer = make_optimizer(model, settings)
    _init_optim_state(optimizer)  # before a first step there are no moments yet
    moments = (tensor for state in optimizer.state.values() for tensor in state.values())
    live.name("optimizer", moments, on_host)

    share = settings.batch_sequences // world.size
    num_micro = min(2, share // micro)
    if num_micro == 2 and settings.sync_every_micro_batch:
        # The second micro-batch is like the first, but gradients are there from its start.
        num_micro = 1
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        live.name("gradients", (p.grad for p in parameters), on_host)
    ids = torch.zeros(num_micro * micro, plan.seq_len, dtype=torch.int64, device=world.device)
    ends = torch.zeros(len(ids) + 1, dtype=torch.int32, device=world.device)
    batch = Batch(ids, ids.clone(), ids.clone(), ends, ids.numel(), (0,) * len(ids))
    teach = teacher.teach if teacher else None
    add_gradients(model, list(split(batch, micro)), 1.0, settings, teach=teach)
    live.name("gradients", (p.grad for p in parameters), on_host)
    clip_grads_with_norm_(parameters, settings.clip_norm, gradient_norm(parameters))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    tensors, _ = describe_state(TrainState(model, optimizer))
    exported = (tensor for name, tensor in tensors.items() if name.startswith("model."))
    with live.making("weights"):  # the export gathers one after another and keeps two
        deque((whole(tensor.to(torch.bfloat16)) for tensor in exported), maxlen=2)


@contextmanager
def _fake_ranks(num_gpus: int) -> Iterator[World]:
    """Rank 0 of many. Its device is the CPU: on a fake GPU, torch's backward fails in C++."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_gpus)
    try:
        yield World(0, num_gpus, CPU, init_device_mesh("cpu", (num_gpus,)))
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_kernels(kernels: str) -> Iterator[None]:
    """Let the flash kernels seem to run on this CPU, as torch's varlen_attn, and Liger's do
    nothing."""
    backend: Any = SimpleNamespace(
        attend=varlen.attend,
        unavailable=lambda: None,
        supports=lambda call: None,
        priority=lambda call: None,
    )
    with patch.dict(dispatch.BACKENDS, {"rehearsed": backend}):
        if kernels != "liger":
            yield
            return
        from triton.runtime.jit import KernelInterface

        # Every launch of a kernel, `kernel[grid](...)`, begins with this method of all its classes.
        launch: Callable[..., object] = lambda self, grid: lambda *args, **kwargs: None  # noqa: E731
        with patch.object(KernelInterface, "__getitem__", launch):
            yield


def as_hybrid(model: PretrainedConfig, ratio: float, window_tokens: int) -> PretrainedConfig:
    """A hybrid of about this ratio. Which groups have the window makes no difference here."""
    if getattr(model, "bosch", None) is not None:
        return model
    groups = model.num_key_value_heads
    row = [int(number >= round(ratio * groups)) for number in range(groups)]
    return hybrid_config(model, [row] * model.num_hidden_layers, window_tokens)


# ---------------------------------------------------------------------------------- what fits


def gpu_memory_gb() -> float | None:
    """The memory of a GPU, the smallest of those that this launch uses on this machine."""
    if not torch.cuda.is_available() or choose_device(os.environ) == CPU:
        return None
    used = range(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return min(torch.cuda.get_device_properties(number).total_memory for number in used) / 1e9


def choose_fitting(
    plan: Plan, memory_gb: float, is_named: bool, rehearse: Callable[[Plan], Rehearsal] = rehearse
) -> int:
    """The plan's micro-batch, or the largest below it that fits. `is_named`: the user has chosen
    it, so another one is only named in the refusal."""
    asked = rehearse(plan)
    if asked.fits(memory_gb):
        return plan.micro_batch
    problem = (
        f"{plan.micro_batch} x {plan.seq_len:,} tokens at once take {asked.peak_bytes / 1e9:.0f} "
        f"GB of a GPU, as rehearsed, and CUDA and NCCL about {MARGIN_GB:g}; it has {memory_gb:.0f}"
    )
    share = plan.settings.batch_sequences // plan.num_gpus
    for micro in range(plan.micro_batch - 1, 0, -1):
        settings = replace(plan.settings, micro_batch_sequences=micro)
        if share % micro or not rehearse(replace(plan, settings=settings)).fits(memory_gb):
            continue
        if is_named:
            raise UserError(
                f"{problem}. Set train.micro_batch_sequences to {micro}, the largest that fits."
            )
        say(f"{problem}. Taking {micro} at once, the largest number that fits")
        return micro
    raise UserError(
        f"{problem}. No smaller number of sequences fits either. Use more GPUs, set "
        "train.cpu_offload to True, or leave the training out with --zero-shot."
    )
