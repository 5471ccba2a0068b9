"""Distributed training: the process group from the launcher's variables, the user's accelerate
config, and `fully_shard`.

`accelerate launch` starts the processes, but we build no `Accelerator`: it does not support FSDP on
CPUs, where it silently uses DDP or starts independent runs. The same code runs in one process, in
two on a CPU, on eight GPUs and on many nodes.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from shutil import which
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from bosch.attention.graphs import allow_graphs
from bosch.config import TrainConfig
from bosch.kernels import choose_kernels
from bosch.run.dist import COLLECTIVE_TIMEOUT, start_ranks
from bosch.run.errors import UserError
from bosch.run.memory import TRUE, is_old_gpu

# What `accelerate launch` says in the environment, from its config file or its options. Three
# variables decide settings that the user has left open (`decide`). Other FSDP_* variables are
# ignored with a line that says so (`describe`), but for those below: accelerate sets them in every
# launch with --use_fsdp, or they ask for what we do anyway (a group for each block, loading once).
OFFLOAD = "FSDP_OFFLOAD_PARAMS"
RESHARD = "FSDP_RESHARD_AFTER_FORWARD"
RECOMPUTE = "FSDP_ACTIVATION_CHECKPOINTING"
IGNORED_SILENTLY = frozenset(
    "FSDP_VERSION FSDP_SHARDING_STRATEGY FSDP_MIN_NUM_PARAMS FSDP_USE_ORIG_PARAMS "
    "FSDP_SYNC_MODULE_STATES FSDP_CPU_RAM_EFFICIENT_LOADING FSDP_AUTO_WRAP_POLICY "
    "FSDP_TRANSFORMER_CLS_TO_WRAP FSDP_BACKWARD_PREFETCH FSDP_STATE_DICT_TYPE".split()
)
# By train.activation_checkpointing: parts of the names of operators whose results are kept, those
# of torch, of flash-attn 2 and 3 and of varlen_attn.
KEPT = {"attention": ("attention", "attn"), "matmuls": ("attention", "attn", "mm.")}
FALSE = {"0", "false", "no", "off"}


def start_world(environment: Mapping[str, str] = os.environ) -> torch.device:
    """Join the other processes of this launch, once; this one's device."""
    check_launch(environment)
    device = choose_device(environment)
    start_ranks(device, even_alone=True)
    return device


def check_launch(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse launches in which accelerate would silently do something else than what was asked
    for."""
    for name, what in (("DEEPSPEED", "DeepSpeed"), ("MEGATRON_LM", "Megatron-LM")):
        if environment.get(f"ACCELERATE_USE_{name}", "").lower() in TRUE:
            problem = f"the accelerate config asks for {what}, but training shards with FSDP"
            raise UserError(f"{problem}. Pass --config_file with one of the files in launch/.")
    # Asked for several processes without a GPU, accelerate starts a single one. It sets the mixed
    # precision in every launch, and the number of processes where there are several; the address
    # may also come from a cluster, for a script that accelerate did not start.
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in environment
    if by_accelerate and "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment:
        raise UserError(
            "accelerate has started only one process, as it does on CPUs even if asked for more. "
            "For N processes use `accelerate launch --use_fsdp --num_processes N ...`; for one, "
            "unset MASTER_ADDR in your environment."
        )
    if (asked := environment.get("ACCELERATE_MIXED_PRECISION", "no")) not in ("no", "bf16"):
        problem = f"the accelerate config asks for mixed precision {asked}, not bf16 or fp32"
        raise UserError(f"{problem}. Pass --mixed_precision bf16.")


def choose_device(environment: Mapping[str, str]) -> torch.device:
    if environment.get("ACCELERATE_USE_CPU", "").lower() in TRUE:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        hides_gpus = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if which("nvidia-smi", path=environment.get("PATH")) and not hides_gpus:
            problem = f"an NVIDIA driver is here, but torch {torch.__version__} cannot use its GPU"
            raise UserError(f"{problem}. Install one that fits, or set ACCELERATE_USE_CPU=true.")
        return torch.device("cpu")
    local_rank = int(environment.get("LOCAL_RANK", 0))
    if local_rank >= (count := torch.cuda.device_count()):
        problem = f"process {local_rank} on this machine has no GPU"
        raise UserError(f"{problem}; there are {count}. Start one per GPU (--num_processes).")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def decide(
    settings: TrainConfig, device: torch.device, environment: Mapping[str, str] = os.environ
) -> TrainConfig:
    """The settings with a value in place of None and auto: that of the accelerate config, or else
    what suits the device."""
    on_gpu = device.type == "cuda"
    kernels: Any = choose_kernels(settings.kernels, device)[0]
    compiles, offloads = settings.compile, settings.cpu_offload
    if compiles is None:  # the pull to a teacher's layers has a number that changes
        unfit = settings.deterministic or settings.layer_weight or is_old_gpu()
        compiles = on_gpu and not unfit
    if offloads is None:
        offloads = says(environment, OFFLOAD) is True
    recomputes, reshards = settings.activation_checkpointing, settings.reshard_after_forward
    if recomputes is None:
        # Its `false` does not count: that is accelerate's default, which it sets in every launch,
        # and need not be the user's choice.
        recomputes = on_gpu or says(environment, RECOMPUTE) is True
    if reshards is None:
        reshards = says(environment, RESHARD) is not False
    return replace(
        settings,
        kernels=kernels,
        compile=compiles,
        cpu_offload=offloads,
        activation_checkpointing=recomputes,
        reshard_after_forward=reshards,
        shard_within_node=bool(settings.shard_within_node),
    )


def says(environment: Mapping[str, str], variable: str) -> bool | None:
    """None: it is not set, or to something that is neither yes nor no."""
    value = environment.get(variable, "").lower()
    if value in TRUE:
        return True
    return False if value in FALSE else None


def choices(
    settings: TrainConfig, num_gpus: int, environment: Mapping[str, str] = os.environ
) -> Iterator[TrainConfig]:
    """What the settings leave open, the fastest first, and what takes the least memory last."""
    decided = decide(settings, torch.device("cuda"), environment)
    within, here = [decided.shard_within_node], node_size(num_gpus, environment)
    if settings.shard_within_node is None and settings.context_parallel <= here < num_gpus:
        within = [True, False]
    recompute: list[Any] = [decided.activation_checkpointing]
    if settings.activation_checkpointing is None and says(environment, RECOMPUTE) is not True:
        recompute = [False, "matmuls", "attention", True]
        if decided.compile:
            # A compiled block that recomputes nothing keeps little more than matrix products.
            recompute.remove("matmuls")
    for one, other in product(within, recompute):
        yield replace(settings, shard_within_node=one, activation_checkpointing=other)


def node_size(world: int, environment: Mapping[str, str] = os.environ) -> int:
    """Ranks on each machine, if all machines have as many; else all ranks."""
    local = int(environment.get("LOCAL_WORLD_SIZE", world))
    return world if world % local else local


def describe(
    settings: TrainConfig, device: torch.device, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """What of the accelerate config training ignores, a line each, and how it computes."""
    decided, ignored = decide(settings, device, environment), []
    if environment.get("ACCELERATE_MIXED_PRECISION") == "bf16" and settings.precision != "bf16":
        ignored.append(f"mixed_precision bf16 is ignored; train.precision is {settings.precision}")
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "NO") != "NO" and not decided.compile:
        ignored.append("dynamo_backend is ignored; set train.compile to compile blocks")
    others = sorted(environment.keys() - IGNORED_SILENTLY - {OFFLOAD, RESHARD, RECOMPUTE})
    asked = [n for n in others if environment[n].lower() not in {*FALSE, "", "none"}]
    if variables := [name for name in asked if name.startswith("FSDP_")]:
        ignored.append(f"ignored {', '.join(variables)}")

    how = [f"computes in {settings.precision}"]
    if kept := decided.activation_checkpointing:
        how.append("activation checkpointing" + (f" ({kept} kept)" if kept in KEPT else ""))
    if decided.cpu_offload:
        how.append("cpu offload")
    if decided.compile:
        how.append("compile")
    if decided.shard_within_node:
        how.append("shard within node")
    if not decided.reshard_after_forward:
        how.append("blocks stay gathered after their forward")
    kernels, reason = choose_kernels(settings.kernels, device)
    how.append(f"kernels {kernels} ({reason})")
    return [*(f"accelerate: {line}" for line in ignored), ", ".join(how)]


def shard_model(model: Any, settings: TrainConfig, device: torch.device) -> None:
    """Shard a causal language model over the ranks in place, with one FSDP group per block. In fp32
    without offloading, a single process does not shard, since the groups would only copy. Norm and
    head are in the root's group, which stays gathered from forward to backward, because the loss
    reads the head's weight without calling it as a linear layer. So are tied embeddings, which are
    that weight."""
    layers = model.model.layers
    if settings.compile:
        # Each block has its own graph, and more of them without gradients or with learned gates.
        allow_graphs(8 * len(layers))
    recompute = settings.activation_checkpointing
    if settings.compile and recompute == "matmuls":
        recompute = False  # a compiled graph keeps them itself, where they cannot be seen
    for index, block in enumerate(layers):
        if settings.compile:  # before it is wrapped: Dynamo leaves a checkpointed frame uncompiled
            block.compile()
        if recompute:
            layers[index] = checkpointed(block, recompute)
    if dist.get_world_size() == 1 and settings.precision == "fp32" and not settings.cpu_offload:
        return
    types, offload = MixedPrecisionPolicy(), OffloadPolicy()
    if settings.precision != "fp32":
        # Parameters stay fp32. bf16 copies compute, and gradients are summed in fp32.
        types = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if settings.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    mesh = make_mesh(settings, device)
    shard = partial(fully_shard, mesh=mesh, mp_policy=types, offload_policy=offload)
    # From the inside out: a group takes the parameters that no group inside of it has.
    for block in layers:
        shard(block, reshard_after_forward=settings.reshard_after_forward)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        shard(model.model.embed_tokens, reshard_after_forward=settings.reshard_after_forward)
    # The loss reads the head's weight without calling it, so nothing would gather it again.
    shard(model, reshard_after_forward=False)


def checkpointed(block: Any, recompute: object) -> Any:
    """The block, recomputed in the backward: all of it (True), or all but what KEPT names."""
    wrap = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    if (parts := KEPT.get(str(recompute))) is None:
        return wrap(block)

    def is_kept(_: object, operator: object, *args: object, **kwargs: object) -> bool:
        # By names, since each kernel is an operator of its own, which need not be installed here.
        return any(part in str(operator) for part in parts)

    return wrap(block, context_fn=partial(create_selective_checkpoint_contexts, is_kept))


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share each sequence with this one, itself included: neighbors by number, so on
    one machine where it has enough of them."""

    group: Any = None  # torch's process group; None: this rank alone
    rank: int = 0  # in it
    size: int = 1


def share_sequences(settings: TrainConfig) -> SequenceGroup:
    """Make the groups; every rank calls this."""
    size = settings.context_parallel
    if size == 1:
        return SequenceGroup()
    if settings.shard_within_node and size > node_size(dist.get_world_size()):
        problem = f"train.context_parallel {size} is more than the ranks of a machine"
        raise UserError(f"{problem}; set train.shard_within_node to False.")
    group, _ = dist.new_subgroups(size, timeout=COLLECTIVE_TIMEOUT)
    return SequenceGroup(group, dist.get_rank() % size, size)


def make_mesh(settings: TrainConfig, device: torch.device) -> DeviceMesh:
    """All ranks in one line, or a line for each node, which has the whole state."""
    size = dist.get_world_size()
    local = node_size(size)
    if settings.shard_within_node and local < size:
        sizes, names = (size // local, local), ("nodes", "ranks")
        return init_device_mesh(device.type, sizes, mesh_dim_names=names)
    return init_device_mesh(device.type, (size,))


def whole(tensor: Tensor) -> Tensor:
    """All of a small tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_name(name: str) -> str:
    """A parameter's name without the part that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


def own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a tensor, to read or write them in place, and the number of the first."""
    target = tensor.detach()
    if not isinstance(target, DTensor):
        return target, 0
    _, first = compute_local_shape_and_global_offset(
        target.shape, target.device_mesh, target.placements
    )
    return target.to_local(), first[0]


def is_first_copy(tensor: Tensor, rank: int) -> bool:
    """Whether no rank before this one has the same rows of the tensor."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    # Where each node has the whole state, rows are equal along the mesh's line of nodes, in which
    # the tensor is `Replicate`: the first node has number 0 there.
    place = tensor.device_mesh.get_coordinate() or ()
    return not any(
        number
        for number, placed in zip(place, tensor.placements, strict=True)
        if placed.is_replicate()
    )
