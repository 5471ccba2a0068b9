"""Processes and shards: the process group from what the launcher sets, the settings of the user's
accelerate config, and `fully_shard`.

`accelerate launch` starts the processes and no `Accelerator` is built: it does no FSDP on CPUs,
where it silently becomes DDP or a number of unrelated runs. The same code runs as one process, as
two on a CPU, on eight GPUs and on many nodes.
"""

import atexit
import datetime
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from bosch.backends._graphs import allow_graphs
from bosch.run.errors import UserError

# A rank that hangs ends the job after this; one that dies is noticed at once. An evaluation at a
# checkpoint, in which ranks do not meet, must fit into it.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=1)

# What `accelerate launch` sets of FSDP and what we make of it (`Switches`). All other FSDP_*
# variables are named in a line and ignored.
HONORED = {
    "FSDP_OFFLOAD_PARAMS": "cpu_offload",
    "FSDP_RESHARD_AFTER_FORWARD": "reshard_after_forward",
    "FSDP_ACTIVATION_CHECKPOINTING": "activation_checkpointing",
}
# Those that name no wish: accelerate sets them in every launch with --use_fsdp, or they ask for
# what is done here anyway (a wrap per block, a start that loads the weights once).
WITHOUT_MEANING = frozenset(
    "FSDP_VERSION FSDP_SHARDING_STRATEGY FSDP_MIN_NUM_PARAMS FSDP_USE_ORIG_PARAMS "
    "FSDP_SYNC_MODULE_STATES FSDP_CPU_RAM_EFFICIENT_LOADING FSDP_AUTO_WRAP_POLICY "
    "FSDP_TRANSFORMER_CLS_TO_WRAP FSDP_BACKWARD_PREFETCH FSDP_STATE_DICT_TYPE".split()
)


# ---------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    def sum(self, *values: float) -> list[float]:
        """Each value, added up over the ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            total = total.to(self.device)
            dist.all_reduce(total)
        return [float(value) for value in total]


def start_world(environment: MutableMapping[str, str] = os.environ) -> World:
    """Join the processes this one was started with; alone where there are none, without a port.

    May be called again: the process group is made once.
    """
    refuse_silent_traps(environment)
    # Set by every launch with --use_fsdp, these would make transformers leave weights on meta.
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        environment.pop(name, None)
    device = choose_device(environment)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if "RANK" in environment:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(leave_world)
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, device, init_device_mesh(device.type, (size,)))


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_device(environment: Mapping[str, str]) -> torch.device:
    if not torch.cuda.is_available() or is_true(environment.get("ACCELERATE_USE_CPU")):
        return torch.device("cpu")
    local_rank = int(environment.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this machine has no GPU: there are "
            f"{torch.cuda.device_count()}. Start as many processes as GPUs (--num_processes)."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def refuse_silent_traps(environment: Mapping[str, str]) -> None:
    """Stop where accelerate starts something other than what was asked for."""
    for name, what in (("DEEPSPEED", "DeepSpeed"), ("MEGATRON_LM", "Megatron-LM")):
        if is_true(environment.get(f"ACCELERATE_USE_{name}")):
            raise UserError(
                f"the accelerate config asks for {what}, which this training does not use: it "
                "shards with FSDP. Run `accelerate config` again, or pass --config_file with one "
                "of the files in launch/."
            )
    # For several processes without a GPU accelerate starts a single one, and says nothing.
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in environment
    if by_accelerate and "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment:
        raise UserError(
            "several processes were asked for, and accelerate has started a single one, as it does "
            "on CPUs. For N processes: accelerate launch --use_fsdp --num_processes N "
            "recipes/recover.py ... If one was asked for, MASTER_ADDR comes from your own "
            "environment: unset it."
        )
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16"):
        raise UserError(
            f"the accelerate config asks for mixed precision {precision}; training computes in "
            "bf16 or fp32. Pass --mixed_precision bf16."
        )


# ----------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Switches:
    """How the model is spread and computed, once settings, accelerate config and device agree."""

    precision: str  # bf16 or fp32, to compute in
    activation_checkpointing: bool
    cpu_offload: bool
    reshard_after_forward: bool
    compile: bool

    def describe(self) -> str:
        names = ("activation_checkpointing", "cpu_offload", "compile")
        switched_on = [name.replace("_", " ") for name in names if getattr(self, name)]
        kept = [] if self.reshard_after_forward else ["blocks stay gathered after their forward"]
        return ", ".join([f"computes in {self.precision}", *switched_on, *kept])


def choose_switches(
    settings: Any, device: torch.device, environment: Mapping[str, str] = os.environ
) -> Switches:
    """Of a TrainConfig. A setting that is None is left to the accelerate config, and where that
    says nothing to what suits the device."""
    chosen = {"cpu_offload": False, "reshard_after_forward": True}
    chosen["activation_checkpointing"] = device.type == "cuda"
    for variable, name in HONORED.items():
        wish = environment.get(variable, "").lower()
        # accelerate sets all three, whether the user said anything or not: `false` is its default
        # of those that save memory, and no wish.
        if wish in TRUE or (wish in FALSE - {""} and name == "reshard_after_forward"):
            chosen[name] = wish in TRUE
        if (value := getattr(settings, name)) is not None:
            chosen[name] = value
    return Switches(settings.precision, compile=settings.compile, **chosen)


def describe_environment(settings: Any, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What the accelerate config says and this training does not do, a line each."""
    lines = []
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "bf16" and settings.precision != "bf16":
        lines.append(
            "accelerate: mixed_precision bf16 is not used, since train.precision is "
            f"{settings.precision}"
        )
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "NO") != "NO" and not settings.compile:
        lines.append("accelerate: dynamo_backend is not used; train.compile compiles the blocks")
    known = WITHOUT_MEANING | HONORED.keys()
    ignored = [
        name
        for name, value in sorted(environment.items())
        if name.startswith("FSDP_") and name not in known and value.lower() not in FALSE | {"none"}
    ]
    if ignored:
        lines.append(f"accelerate: ignored {', '.join(ignored)}")
    return lines


TRUE = frozenset(("1", "true", "yes", "on"))
FALSE = frozenset(("0", "false", "no", "off", ""))


def is_true(value: str | None) -> bool:
    return value is not None and value.lower() in TRUE


# ------------------------------------------------------------------------------------------- shards


def shard_model(model: Any, world: World, switches: Switches) -> None:
    """Shard a causal language model over the ranks in place, a group for each block. One process
    that casts and offloads nothing keeps its parameters as they are: the groups would only copy.

    Norm and head stay in the root's group, which is whole from its forward to its backward: losses
    read the head's weight without calling it as a linear layer. Tied embeddings belong to that
    group too, because they are that weight; untied ones get a group of their own.
    """
    layers = model.model.layers
    if switches.compile:
        # Each block is a graph of its own, others where gradients are off or gates are learned.
        allow_graphs(8 * len(layers))
    for index, block in enumerate(layers):
        if switches.activation_checkpointing:
            block = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
            layers[index] = block
        if switches.compile:
            block.compile()
    if world.size == 1 and switches.precision == "fp32" and not switches.cpu_offload:
        return
    options: dict[str, Any] = {
        "mesh": world.mesh,
        "reshard_after_forward": switches.reshard_after_forward,
    }
    if switches.precision != "fp32":
        # Parameters are fp32 always; bf16 copies compute, and gradients are summed in fp32.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if switches.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    for block in layers:
        fully_shard(block, **options)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        fully_shard(model.model.embed_tokens, **options)
    fully_shard(model, **(options | {"reshard_after_forward": False}))


def state_device(world: World, switches: Switches) -> torch.device:
    """Where parameters and optimizer live."""
    return torch.device("cpu") if switches.cpu_offload else world.device


def set_gradient_sync(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward averages gradients over the ranks."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def reshard(model: nn.Module) -> None:
    """After a forward without a backward: the root's parameters as the optimizer knows them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a small tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
