"""Loads the model to train: built on the meta device, sharded, then each rank reads its own part.

No rank ever holds more than its own part and one slice of a file. Buffers that are in no file, the
tables of rotary embeddings, are computed again: left at zero they would give a plausible loss.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import bosch  # noqa: F401  registers hybrids and their attention with transformers
from bosch.hybrid import materialize
from bosch.hybrid.attention import NAME
from bosch.hybrid.models import family_of
from bosch.hybrid.shards import weight_files
from bosch.model import explain_library_errors
from bosch.run.errors import UserError
from bosch.training.kernels import install_kernels
from bosch.training.loss import install_loss_head
from bosch.training.parallel import Switches, World, shard_model
from bosch.training.trained import choose_trained, first_lora_values


def start_model(
    folder: Path,
    world: World,
    switches: Switches,
    kernels: str,
    trained: str = "all",
    lora_rank: int = 16,
) -> PreTrainedModel:
    """The model of a folder, in fp32, sharded, ready to train. Every rank calls this."""
    model = build_on_meta(read_config(folder))
    choose_trained(model, trained, lora_rank)
    return fill_model(make_empty(model, world, switches, kernels), folder, world)


def make_empty(
    model: PreTrainedModel, world: World, switches: Switches, kernels: str
) -> PreTrainedModel:
    """The sharded model before its weights are read: memory, with anything in it."""
    install_kernels(model, kernels)
    install_loss_head(model, kernels)
    return allocate(model, world, switches).train()


def allocate(model: Any, world: World, switches: Switches) -> PreTrainedModel:
    """Shard a model on the meta device and give it memory."""
    shard_model(model, world, switches)
    device = torch.device("cpu") if switches.cpu_offload else world.device
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    model._apply(lambda tensor: torch.empty_like(tensor, device=device))
    if is_tied:  # moving off the meta device makes new parameters, unless they are sharded
        model.lm_head.weight = model.model.embed_tokens.weight
    allocated: PreTrainedModel = model
    return allocated


def fill_model(
    model: PreTrainedModel, folder: Path, world: World, head_is_embedding: bool = False
) -> PreTrainedModel:
    """head_is_embedding: the files hold one matrix for both, although the model has two."""
    load_weights(model, folder, head_is_embedding)
    make_buffers(model, world.device)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert not tensor.is_meta, f"{name} was never filled"
    return model


def read_config(folder: Path) -> PretrainedConfig:
    """From config.json. The model must be of a family that can be a hybrid."""
    config = materialize.read_config(folder)
    family_of(config)
    return config


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model with the shapes of its weights, but no memory for them."""
    config.use_cache = False
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False
        )
    return model


# ------------------------------------------------------------------------------------------ weights


def load_weights(model: nn.Module, folder: Path, head_is_embedding: bool = False) -> None:
    """Fill each parameter's local part from the folder's safetensors files."""
    with ExitStack() as stack:
        slices: dict[str, Any] = {}  # by name of the tensor
        for file_name in weight_files(folder):
            with explain_library_errors(f"{folder / file_name} is not a complete safetensors file"):
                file = stack.enter_context(safe_open(folder / file_name, framework="pt"))
            slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  no mapping
        if head_is_embedding:
            slices.setdefault("lm_head.weight", slices["model.embed_tokens.weight"])
        filled: set[int] = set()
        for name, parameter in model.state_dict(keep_vars=True).items():
            if id(parameter) in filled:  # tied to one that was read
                continue
            filled.add(id(parameter))
            read = find_reader(name, slices)
            if (values := first_lora_values(name, parameter.shape)) is not None:
                read = values.__getitem__
            if read is None:
                raise UserError(
                    f"{folder} has no weights {name!r}, which its config.json asks for. It is "
                    "incomplete or its config.json is that of another model."
                )
            shape = list(parameter.shape)
            if name in slices and (there := slices[name].get_shape()) != shape:
                raise UserError(
                    f"{folder}: {name} has the shape {there}, but by config.json it would be "
                    f"{shape}. Pass a folder whose config.json belongs to its weights."
                )
            with torch.no_grad():
                fill(parameter, read)


Reader = Callable[[slice], Tensor]  # of the first dimension


def find_reader(name: str, slices: Mapping[str, Any]) -> Reader | None:
    """How to read a parameter's rows; None if the files do not have it.

    The model has one tensor for the experts of a layer, with one row per expert. The files hold the
    experts one by one.
    """
    if name in slices:
        read: Reader = slices[name].__getitem__
        return read
    prefix, _, kind = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
    if parts is None or f"{prefix}.0.{parts[0]}.weight" not in slices:
        return None

    def read_experts(rows: slice) -> Tensor:
        experts = [
            torch.cat([slices[f"{prefix}.{number}.{part}.weight"][:] for part in parts])
            for number in range(rows.start, rows.stop)
        ]
        return torch.stack(experts)

    return read_experts


def fill(parameter: Tensor, read: Reader) -> None:
    """Copy this rank's rows of a parameter, converting from the file's type."""
    target, begin = parameter.detach(), 0
    if isinstance(target, DTensor):
        _, offset = compute_local_shape_and_global_offset(
            target.shape, target.device_mesh, target.placements
        )
        target, begin = target.to_local(), offset[0]
    if target.numel():
        target.copy_(read(slice(begin, begin + target.shape[0])))


# ------------------------------------------------------------------------------------------ buffers


def make_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute every buffer as a new module would. With a rotary table of zeros a model would still
    train, a little worse."""
    for module in model.modules():
        if not module._buffers:
            continue
        config = getattr(module, "config", None)
        if config is None:
            raise UserError(
                f"{type(module).__name__} has buffers that are in no file, and no config to "
                "compute them from, so this model cannot be trained here. Pass another one."
            )
        fresh = dict(type(module)(config).named_buffers(recurse=False))
        for name in dict(module.named_buffers(recurse=False)):
            assert bool(fresh[name].abs().sum() > 0), f"buffer {name} is all zeros"
            setattr(module, name, fresh[name].to(device))
