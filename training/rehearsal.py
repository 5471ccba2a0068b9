"""What a training will take, found before it runs.

`rehearse`: the memory of a step on GPUs, on a CPU in a minute. The step runs through our own start,
shards, loop, loss and optimizer as one rank of many, with torch's fake tensors, which have a shape
and no content, and its fake process group, which sends nothing. Attention is that of torch's
varlen_attn, whose memory is that of every flash kernel, and each row is one document. Liger's
Python code runs with its kernels left out. Experts take the same memory however tokens are routed.
Blocks are not compiled, and fp8 is rehearsed as bf16, which it keeps for the backward. Where each
node has the whole state, one node is rehearsed. An evaluation's memory is computed: it has a whole
model on every GPU, while the training's share waits in host memory (parking.py).

Not included: CUDA itself, NCCL, fragmentation, and a block that is gathered while another one is
still in use; MARGIN_GB is for these. Nor, with offloading, one block's fp32 weights on their way.

`estimate`: disk, downloads and time, as far as the model's shape tells.
"""

import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.utils import clip_grads_with_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from bosch.attention import dispatch
from bosch.attention.backends import varlen
from bosch.config import Config, EvaluationConfig, TrainConfig
from bosch.data import tokens_stage
from bosch.data.loader import Batch
from bosch.hybrid.conversion import head_size, hybrid_config, plain_config
from bosch.masks.mask import describe_bytes, spread_mask
from bosch.masks.window import full_layers
from bosch.methods._settings import default_settings, learning_tokens
from bosch.model import find_model
from bosch.run.errors import UserError
from bosch.run.memory import available_host_bytes
from bosch.run.progress import say
from bosch.training import model_start, parallel
from bosch.training.attention_speed import AttentionSpeed
from bosch.training.checkpoint import TrainState, describe_state
from bosch.training.loop import add_gradients, split
from bosch.training.metrics import count_active_weights, training_flops
from bosch.training.model_start import build_on_meta, choose_trained, gradient_norm
from bosch.training.parallel import (
    choices,
    choose_device,
    decide,
    node_size,
    share_sequences,
    whole,
)
from bosch.training.parking import MOMENTS, STEP_BYTES, check_host_memory
from bosch.training.schedule import TrainSchedule, choose_micro_batch
from bosch.training.teacher import Teacher, build_dense, lesson_type

KINDS = ("weights", "gradients", "optimizer", "activations", "loss")
# Of a table of rehearsals.
COLUMNS = {"GPUs": "gpus", "kernels": "kernels", "at once": "micro_batch_sequences"}
COLUMNS |= {"peak, GB": "value:.1f", **{kind: f"{kind}:.1f" for kind in KINDS}}
COLUMNS |= {"evaluation": "evaluation:.1f", "fits": "fits"}
KERNELS = ("torch", "liger")
REHEARSED = "rehearsed"  # the attention backend in place of flash kernels
MARGIN_GB = 6.0
# Of the speed of large matrix products, what a training step may reach. On CPUs the embedded model
# reaches .33 (one thread, CPU time), SmolLM2 with LoRA .30 (its recorded run, beside its search) to
# .88 (another processor), in between .56 (a third, 75 steps in 17 minutes of one core, fp32).
SPEED_SHARE, CPU_SPEED_SHARE = 0.5, 0.5
# Of a CPU's time in fp32, what is no product: norms, softmax, draws from the vocabulary. Faster
# bf16 products leave it as it is. SmolLM2 read 1,024 tokens in bf16 at 164 and 250 GFLOP/s by one
# core whose products reached 379 and 1,094 in that minute, at 277 and 385 by two; fp32: 74, 110.
NO_PRODUCTS = 0.4
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@dataclass(frozen=True)
class Plan:
    """A training to rehearse."""

    model: PretrainedConfig
    settings: TrainConfig
    seq_len: int
    num_gpus: int
    kernels: Any  # torch or liger
    teacher: PretrainedConfig | None = None  # None: the model itself, without windows

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise UserError(f"cannot rehearse on {self.num_gpus} GPUs; name at least 1.")
        positions = self.model.max_position_embeddings
        if self.seq_len > positions:
            problem = f"sequences of {self.seq_len:,} tokens do not fit the {positions:,} positions"
            raise UserError(f"{problem}; make them shorter.")
        if self.kernels == "liger" and find_spec("liger_kernel") is None:
            raise UserError("Liger's kernels cannot be rehearsed: liger-kernel is not installed.")
        self.micro_batch  # noqa: B018  refuses a batch that the ranks cannot share

    @property
    def num_groups(self) -> int:
        """Of GPUs that share their sequences."""
        return self.num_gpus // self.settings.context_parallel

    @property
    def micro_batch(self) -> int:
        return choose_micro_batch(self.settings, self.seq_len, self.num_gpus, "cuda")

    def of_a_node(self) -> "Plan":
        """Its share of the batch, if each node has the whole state."""
        here = node_size(self.num_gpus) if self.settings.shard_within_node else self.num_gpus
        share = self.settings.batch_sequences * here // self.num_gpus
        return replace(self, settings=replace(self.settings, batch_sequences=share), num_gpus=here)


@dataclass(frozen=True)
class Rehearsal:
    """What a plan would take."""

    peak: Mapping[str, int]  # bytes by kind on one GPU, at the moment when it holds most
    evaluation_bytes: int = 0  # of an evaluation at a checkpoint

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    def fits(self, memory_gb: float) -> bool:
        return max(self.peak_bytes, self.evaluation_bytes) / 1e9 + MARGIN_GB <= memory_gb

    def row(self, plan: Plan, memory_gb: float) -> dict[str, Any]:
        """For a table with COLUMNS."""
        row: dict[str, Any] = {"gpus": plan.num_gpus, "kernels": plan.kernels}
        row |= {"micro_batch_sequences": plan.micro_batch}
        row |= {"value": self.peak_bytes / 1e9, "unit": "GB"}
        row |= {kind: self.peak[kind] / 1e9 for kind in KINDS}
        row |= {"evaluation": self.evaluation_bytes / 1e9, "memory_gb": memory_gb}
        return row | {"fits": "yes" if self.fits(memory_gb) else "NO"}


def rehearse(plan: Plan) -> Rehearsal:
    """In a process of its own: a process has one process group, and GPUs would change kernels."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_hide_gpus) as pool:
        return pool.submit(rehearse_here, plan).result()


def _hide_gpus() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def rehearse_here(plan: Plan) -> Rehearsal:
    """A step of training (training/loop.py) and what saves its result, with fake tensors."""
    plan, micro = plan.of_a_node(), plan.micro_batch
    # As for a GPU, but on the CPU: on a fake GPU, torch's backward fails in C++.
    settings = decide(
        replace(plan.settings, kernels="liger" if plan.kernels == "liger" else "torch"), CUDA
    )
    if settings.compile and settings.activation_checkpointing == "matmuls":
        # A compiled graph chooses what it keeps, never more than all. So all is kept here.
        settings = replace(settings, activation_checkpointing=False)
    settings = replace(settings, compile=False)
    if settings.in_fp8:
        settings = replace(settings, precision="bf16")
    model = build_on_meta(plan.model)  # fake parameters on the meta device cannot leave it
    dense = build_dense(plan.teacher or plan.model, settings) if settings.asks_teacher else None
    # A GPU holds most in its second micro-batch, beside the gradients of the first; a third is like
    # the second.
    num_micro = min(2, settings.batch_sequences // plan.num_groups // micro)
    has_gradients = num_micro == 2 and settings.sync_every_micro_batch
    if has_gradients:  # the second micro-batch is like the first, with gradients from its start on
        num_micro = 1
    # Not fake, since their values are asked for: one text in each row.
    ends = torch.arange(num_micro * micro + 1, dtype=torch.int32) * plan.seq_len

    with fake_world(plan.num_gpus, plan.kernels) as live:
        shared = share_sequences(settings)

        def name_state(kind: str, tensors: Iterable[Any]) -> None:
            live.name("host" if settings.cpu_offload else kind, tensors)

        def kind_is(kind: str) -> Callable[..., None]:
            return lambda *_: setattr(live, "kind", kind)

        # The model and its optimizer.
        live.kind = "weights"
        model = model_start.make_empty(model, settings, CPU)
        teacher = Teacher(dense, settings, CPU, model) if dense else None
        live.kind = "activations"
        name_state("weights", model.parameters())
        for module in model.modules():
            # fully_shard gathers a module's weights just before its forward, into new tensors that
            # nobody could name earlier.
            module.register_forward_pre_hook(
                lambda module, _: live.name("weights", module.parameters(recurse=False))
            )
        head = model.get_submodule("lm_head")
        head.register_forward_pre_hook(kind_is("loss"))
        head.register_forward_hook(kind_is("activations"))
        parameters = model_start.trained_parameters(model)
        optimizer = model_start.make_optimizer(model, settings)
        _init_optim_state(optimizer)  # before a first step there are no moments yet
        for moments in optimizer.state.values():
            name_state("optimizer", moments.values())

        # A step.
        if has_gradients:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            name_state("gradients", (p.grad for p in parameters))
        # Zeros are as good as any tokens: fake tensors have no values.
        ids = torch.zeros(num_micro * micro, plan.seq_len, dtype=torch.int64)
        batch = Batch(ids, ids.clone(), ids.clone(), ends, ids.numel(), (0,) * len(ids))
        is_flash = settings.attention in ("auto", "flash", "varlen")
        backend = REHEARSED if is_flash else settings.attention
        micro_batches = list(split(batch, micro, backend, shared))
        teach = teacher.teach if teacher else None
        add_gradients(model, micro_batches, 1.0, settings, teach=teach)
        name_state("gradients", (p.grad for p in parameters))
        clip_grads_with_norm_(parameters, settings.clip_norm, gradient_norm(parameters))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        # Its checkpoint, and the export, which gathers one tensor after another and keeps two.
        tensors, _ = describe_state(TrainState(model, optimizer))
        exported = (tensor for name, tensor in tensors.items() if name.startswith("model."))
        live.kind = "weights"
        deque((whole(tensor.to(torch.bfloat16)) for tensor in exported), maxlen=2)
    peak = live.peak()
    return Rehearsal({kind: peak[kind] for kind in KINDS}, evaluation_bytes(plan))


def evaluation_bytes(plan: Plan) -> int:
    """In bf16, of the dense model and a text as long as in training, read in chunks."""
    # Of a chunk a block has about six tensors as wide as the model at once (the residual, its norm,
    # queries, keys, values and outputs) and three as wide as its MLP.
    model, chunk = plan.model, min(plan.seq_len, EvaluationConfig.prefill_chunk)
    cache = 2 * model.num_hidden_layers * model.num_key_value_heads * head_size(model)
    wide = max(model.intermediate_size, getattr(model, "moe_intermediate_size", 0))
    activations = chunk * (6 * model.hidden_size + 3 * wide)
    return 2 * (num_weights(model) + plan.seq_len * cache + activations)


def parked_bytes(plan: Plan) -> int:
    """In the host memory of each machine, while a checkpoint is evaluated (training/parking.py)."""
    settings = decide(plan.settings, CUDA)
    if settings.cpu_offload:
        return 0  # it is in host memory all the time
    total = state_bytes(plan)
    if settings.asks_teacher:
        teacher = build_dense(plan.teacher or plan.model, settings)
        total += sum(p.nbytes for p in teacher.parameters())
    here = node_size(plan.num_gpus)
    return total if settings.shard_within_node else total * here // plan.num_gpus


def state_bytes(plan: Plan) -> int:
    """Of a training's weights, in fp32, and of the optimizer's moments of those it trains."""
    model = build_on_meta(plan.model)
    choose_trained(model, plan.settings.trained, plan.settings.lora_rank)
    weights, trained = model.parameters(), model_start.trained_parameters(model)
    return sum(p.nbytes for p in weights) + sum(MOMENTS * p.nbytes + STEP_BYTES for p in trained)


def with_room_to_park(plan: Plan, available: float | None) -> Plan:
    """The plan, for machines of so much available host memory. Where it is left open whether each
    machine has the whole state, that must fit; a plan that does not fit at all is refused."""
    if available is None:
        return plan
    whole, shared = (
        replace(plan, settings=replace(plan.settings, shard_within_node=within))
        for within in (True, False)
    )
    if plan.settings.shard_within_node is None and parked_bytes(whole) > available:
        plan = shared
    check_host_memory(parked_bytes(plan), available, node_size(plan.num_gpus))
    return plan


def num_weights(model: PretrainedConfig) -> int:
    return sum(weight.numel() for weight in build_on_meta(model).parameters())


@contextmanager
def fake_world(num_gpus: int, kernels: str) -> Iterator["LiveMemory"]:
    """Inside, this process is one of as many ranks, and tensors are fake and counted. The flash
    kernels seem to run on this CPU, as torch's varlen_attn, and Liger's do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    nothing: Any = lambda *_, **__: None  # noqa: E731
    # The three questions of a backend, whether it can run, are all answered by None: it can.
    backend: Any = SimpleNamespace(
        attend=varlen.attend, unavailable=nothing, supports=nothing, priority=nothing
    )
    with ExitStack() as stack:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_gpus)
        stack.callback(dist.destroy_process_group)
        # Made before tensors are fake, since it looks at values.
        mesh = init_device_mesh("cpu", (num_gpus,))
        stack.enter_context(patch.object(parallel, "init_device_mesh", lambda *_: mesh))
        stack.enter_context(patch.dict(dispatch.BACKENDS, {REHEARSED: backend}))
        if kernels == "liger":
            from triton.runtime.jit import KernelInterface

            # Every launch of a kernel, `kernel[grid](...)`, begins with this method of its class.
            launch = patch.object(KernelInterface, "__getitem__", lambda *_: nothing)
            stack.enter_context(launch)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(live_memory())


def as_hybrid(model: PretrainedConfig, ratio: float, window_tokens: int) -> PretrainedConfig:
    """A hybrid with as many groups on the window as a run of this ratio. Which ones they are makes
    no difference here."""
    if getattr(model, "bosch", None) is not None:
        return model
    z = spread_mask(ratio, len(full_layers(model)), model.num_key_value_heads)
    return hybrid_config(model, z, window_tokens)


# ------------------------------------------------------------------- what fits, and what it takes


def gpu_memory_gb() -> float | None:
    """The memory of a GPU, the smallest of those that this launch uses on this machine."""
    if not torch.cuda.is_available() or choose_device(os.environ) == CPU:
        return None
    used = range(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return min(torch.cuda.get_device_properties(number).total_memory for number in used) / 1e9


def choose_fitting(
    plan: Plan, memory_gb: float, is_named: bool, rehearse: Callable[[Plan], Rehearsal] = rehearse
) -> TrainConfig:
    """The plan's settings with the largest micro-batch that fits, up to the plan's, and for it the
    fastest of what they leave open. `is_named`: the user has chosen the micro-batch, so another one
    is only named in the refusal."""
    share, problem = plan.settings.batch_sequences // plan.num_groups, ""
    for micro in range(plan.micro_batch, 0, -1):
        if share % micro:  # micro-batches are all of one size
            continue
        sized = replace(plan.settings, micro_batch_sequences=micro)
        for settings in choices(sized, plan.num_gpus):
            found = rehearse(replace(plan, settings=settings))
            if not found.fits(memory_gb):
                continue
            if problem and is_named:
                name = "train.micro_batch_sequences"
                raise UserError(f"{problem}. Set {name} to {micro}, the largest that fits.")
            if problem:
                say(f"{problem}. Taking {micro} at once, the largest number that fits")
            return settings
        problem = problem or (
            f"{micro} x {plan.seq_len:,} tokens at once take {found.peak_bytes / 1e9:.0f} GB of a "
            f"GPU, as rehearsed, and CUDA and NCCL about {MARGIN_GB:g}; it has {memory_gb:.0f}"
        )
    raise UserError(
        f"{problem}. No smaller number of sequences fits either. Use more GPUs, let several share "
        "each sequence (train.context_parallel), set train.cpu_offload to True, or leave the "
        "training out with --zero-shot."
    )


def estimate(config: Config, plan: Plan, schedule: TrainSchedule | None) -> list[str]:
    """Lines on what a run downloads and writes, and parks on GPUs. schedule: None if nothing is
    trained. Predictions, curves and reports are too small to count."""
    dtype = plan.model.dtype or torch.float32  # before a model is built, which changes it
    weights = num_weights(plan.model)
    model_bytes = weights * (getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize
    vocabulary, states = plan.model.vocab_size, config.train.keep_checkpoints
    lines, disk = [], {"the hybrid": model_bytes}
    if find_model(config.model) is None:
        lines.append(f"to download: {config.model}, {describe_bytes(model_bytes)}")
    if schedule is not None:
        exported = len([step for step in schedule.all_evaluated_steps if step])
        disk[f"{exported} evaluated checkpoints"] = exported * model_bytes
        disk[f"{states} training states"] = states * state_bytes(plan)
        disk["another while it is written"] = state_bytes(plan)  # an old one is removed after that
    learned = learning_tokens(config)
    if learned:  # by a training of all weights
        of_all = replace(plan, settings=replace(plan.settings, trained="all"))
        of_learning = describe_bytes((states + 1) * state_bytes(of_all))
        lines.append(f"disk while the mask is learned, free after it: at most {of_learning}")
        settings = default_settings(config.method, config.mask)
        if getattr(settings, "weights", "original") == "learned":
            disk["weights that the mask was learned with"] = model_bytes
    if (schedule is not None or learned) and config.data.tokens_from is None:
        disk["tokens"] = config.data.tokens * (2 if vocabulary <= 1 << 16 else 4)
    if schedule is not None and config.train.stored_shares:
        size = lesson_type(config.train.stored_shares, vocabulary).itemsize
        disk["lessons"] = tokens_stage.count(config) * size
    parts = ", ".join(f"{name} {describe_bytes(count)}" for name, count in disk.items())
    lines.append(f"disk: about {describe_bytes(sum(disk.values()))} ({parts})")
    if schedule is not None and gpu_memory_gb() is not None:
        available = describe_bytes(available_host_bytes() or 0)
        lines.append(f"{describe_parked(plan)}; {available} are available here")
    return lines


def describe_parked(plan: Plan) -> str:
    taken, here = describe_bytes(parked_bytes(plan)), node_size(plan.num_gpus)
    return f"host memory while a checkpoint is evaluated: {taken} for {here} GPUs of a machine"


def training_seconds(plan: Plan, num_sequences: int, has_sink: bool = False) -> float:
    """Of a training on so many sequences. From the FLOPs, and from the speed of large matrix
    products here, which is measured in the type that a training has; attention by its own rates, if
    this device has any."""
    models = [(plan.model, True)]
    if plan.settings.objective == "distill":
        models.append((plan.teacher or plain_config(plan.model), False))
    return _seconds(plan, models, num_sequences, has_sink)


def validation_seconds(plan: Plan, num_sequences: int, has_sink: bool = False) -> float:
    """Of reading so many sequences for their loss."""
    return _seconds(plan, [(plan.model, False)], num_sequences, has_sink)


def _seconds(
    plan: Plan, models: Sequence[tuple[Any, bool]], num_sequences: int, has_sink: bool
) -> float:
    """Of sequences that pass models, each of which is trained on them or reads them only."""
    sequences = [plan.seq_len] * num_sequences
    dtype = torch.float32 if plan.settings.precision == "fp32" else torch.bfloat16
    known = AttentionSpeed.here(dtype)
    recomputed = plan.settings.activation_checkpointing
    flops = attention = 0.0
    for one, is_trained in models:
        model, num_frozen = build_on_meta(one), 0
        num_weights = count_active_weights(model)
        if is_trained:
            choose_trained(model, plan.settings.trained, plan.settings.lora_rank)
            num_frozen = count_active_weights(model, only_frozen=True)
        count = training_flops(one, num_weights, sequences, num_frozen)
        if is_trained and recomputed in (True, "attention"):  # all products forward, once more
            count += 2 * num_weights * sum(sequences)
        if known is not None:
            count -= training_flops(one, 0, sequences)  # that of attention
            attention += known.seconds(one, sequences, is_trained, sink=has_sink)
            if is_trained and recomputed is True:
                attention += known.seconds(one, sequences, False, sink=has_sink)
        flops += count * (1 if is_trained else 1 / 3)  # a forward is a third of a step
    on_cpu = choose_device(os.environ).type == "cpu"  # ranks on it share its cores
    share, devices = (CPU_SPEED_SHARE, 1) if on_cpu else (SPEED_SHARE, plan.num_gpus)
    return (flops / (share * work_speed(dtype)) + attention) / devices


def work_speed(dtype: torch.dtype) -> float:
    """FLOPs per second of work that is mostly large matrix products, on this rank's device."""
    products = matmul_speed(dtype)
    if choose_device(os.environ).type != "cpu" or dtype == torch.float32:
        return products
    return 1 / ((1 - NO_PRODUCTS) / products + NO_PRODUCTS / matmul_speed(torch.float32))


@cache
def matmul_speed(dtype: torch.dtype) -> float:
    """FLOPs per second of large matrix products on this rank's device. Measured once, so that the
    settings that --hours compares are all judged by one speed."""
    device = choose_device(os.environ)
    size = 1024 if device.type == "cpu" else 8192
    left, right = torch.ones(2, size, size, dtype=dtype, device=device)
    # On CPUs the time of this process alone: a product takes so long that beside other programs
    # each is interrupted, which made fp32 look nine times as slow as it was.
    on_cpu, seconds = device.type == "cpu", []
    clock = time.process_time if on_cpu else time.perf_counter
    for _ in range(5):
        begin = clock()
        float((left @ right)[0, 0])  # waits for the device
        seconds.append((clock() - begin) / (torch.get_num_threads() if on_cpu else 1))
    # The fastest, since the first of five also loads kernels.
    return 2 * size**3 / min(seconds)


# -------------------------------------------------------------------------- counting what is alive

ALLOCATED_BYTES = 512  # CUDA's allocator rounds up to a multiple of this
# What the arguments of fully_shard's own operators are for.
PURPOSES = {
    "fsdp::all_gather_copy_in": "weights",
    "fsdp::split_with_sizes_copy": "weights",
    "fsdp::chunk_cat": "gradients",
    "c10d::_reduce_scatter_base_": "gradients",
}
# Answers to questions about the values of fake tensors, by operator.
ANSWERS = {torch.ops.aten._local_scalar_dense.default: 0, torch.ops.aten.equal.default: False}


@dataclass
class Piece:
    """Memory that was in use from one moment to another."""

    num_bytes: int
    kind: str
    begin: float
    end: float = float("inf")


@contextmanager
def live_memory() -> Iterator["LiveMemory"]:
    """Counts the memory of all tensors made inside, real or fake, while they are alive; not memory
    inside an operator, and what an allocator adds. Under FakeTensorMode every question about a
    value is answered by 0 or no."""
    live, resize = LiveMemory(), torch.UntypedStorage.resize_
    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name)

    def resize_and_count(storage: Any, size: int) -> None:
        resize(storage, size)
        live.count(storage, "weights")

    def propagate_uncounted(*args: Any) -> object:
        before, live.is_paused = live.is_paused, True
        try:
            return propagate(*args)
        finally:
            live.is_paused = before

    # Torch has no public way to see these two. fully_shard frees gathered weights by resizing their
    # storage to 0. And to learn the shape of a result, DTensor computes it for the whole model with
    # fake tensors, which take no memory in a real run.
    resizing = patch.object(torch.UntypedStorage, "resize_", resize_and_count)
    with resizing, patch.object(ShardingPropagator, name, propagate_uncounted), live:
        yield live


class LiveMemory(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kind = "activations"  # of what is made now
        self.is_paused = False
        self._pieces: list[Piece] = []
        self._alive: dict[int, tuple[weakref.ref[Any], Piece]] = {}  # by storage
        self._moment = 0

    def peak(self) -> Counter[str]:
        """Bytes by kind at the moment when the device held most."""
        pieces = [piece for piece in self._pieces if piece.kind != "host"]
        changes = [(piece.begin, piece.num_bytes) for piece in pieces]
        changes += [(piece.end, -piece.num_bytes) for piece in pieces]
        # No two changes have one moment, so nothing ends and begins in between.
        now, most, top = 0, 0, 0.0
        for moment, change in sorted(changes):
            now += change
            if now > most:
                most, top = now, moment
        found: Counter[str] = Counter()
        for piece in pieces:
            if piece.begin <= top < piece.end:
                found[piece.kind] += piece.num_bytes
        return found

    def name(self, kind: str, tensors: Iterable[Any]) -> None:
        """Say what tensors that were made before are for. `host`, for good: in memory of the host,
        as fake tensors that are on the CPU anyway cannot tell."""
        for tensor in tensors:
            known = self._alive.get(_storage(tensor)._cdata) if isinstance(tensor, Tensor) else None
            if known and known[1].kind != "host":
                known[1].kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # this comes again with its local tensors
        if func in ANSWERS and active_fake_mode() is not None:
            return ANSWERS[func]
        result = func(*args, **(kwargs or {}))
        for tensor in () if self.is_paused else tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self.count(_storage(tensor), self.kind)
        if kind := PURPOSES.get(func.name()):
            self.name(kind, tree_leaves((args, kwargs)))
        return result

    def count(self, storage: Any, kind: str) -> None:
        # By its address in C++, since views and detached tensors share one storage. torch keeps a
        # storage's Python object for as long as the storage, so the weak reference ends with the
        # memory itself; then another storage may get the same address.
        key, num_bytes = storage._cdata, -(-storage.nbytes() // ALLOCATED_BYTES) * ALLOCATED_BYTES
        if key in self._alive:
            if self._alive[key][1].num_bytes == num_bytes:
                return
            self._end(key)
        self._moment += 1
        self._pieces.append(Piece(num_bytes, kind, self._moment))
        self._alive[key] = weakref.ref(storage, lambda _: self._end(key)), self._pieces[-1]

    def _end(self, key: int) -> None:
        if (known := self._alive.pop(key, None)) is not None:
            self._moment += 1
            known[1].end = self._moment


def _storage(tensor: Tensor) -> Any:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
