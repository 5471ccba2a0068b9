"""Loads the model to train: built on the meta device, sharded, then each rank reads its own part.

No rank ever holds more than its own part and one slice of a file. Buffers that are in no file, the
tables of rotary embeddings, are computed again: left at zero they would give a plausible loss.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import bosch  # noqa: F401  registers hybrids and their attention with transformers
from bosch.config import TrainConfig
from bosch.hybrid import materialize
from bosch.hybrid.attention import NAME
from bosch.hybrid.models import family_of
from bosch.hybrid.shards import weight_files
from bosch.model import explain_library_errors
from bosch.run.errors import UserError
from bosch.training.loss import install_kernels
from bosch.training.parallel import own_rows, shard_model
from bosch.training.trained import choose_trained, first_lora_values


def start_model(folder: Path, settings: TrainConfig, device: torch.device) -> PreTrainedModel:
    """The model of a folder, in fp32, sharded, ready to train. Every rank calls this. The settings
    are those that `decide` returns."""
    model = build_on_meta(read_config(folder))
    model = make_empty(model, settings, device)
    fill_model(model, folder, device)
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


def make_empty(
    model: PreTrainedModel, settings: TrainConfig, device: torch.device
) -> PreTrainedModel:
    """The model to train before its weights are read."""
    choose_trained(model, settings.trained, settings.lora_rank)
    install_kernels(model, settings.kernels)
    return allocate(model, settings, device).train()


def allocate(model: Any, settings: TrainConfig, device: torch.device) -> PreTrainedModel:
    """Shard a model on the meta device and give it memory, with anything in it."""
    shard_model(model, settings, device)
    if settings.cpu_offload:
        device = torch.device("cpu")
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    model._apply(lambda tensor: torch.empty_like(tensor, device=device))
    if is_tied:  # moving off the meta device makes new parameters, unless they are sharded
        model.lm_head.weight = model.model.embed_tokens.weight
    allocated: PreTrainedModel = model
    return allocated


def fill_model(
    model: PreTrainedModel, folder: Path, device: torch.device, head_is_embedding: bool = False
) -> None:
    """Fill each parameter's local part from the folder's safetensors files, and compute the
    buffers. head_is_embedding: the files hold one matrix for both, although the model has two."""
    with ExitStack() as stack:
        slices: dict[str, Any] = {}  # by name of the tensor
        for file_name in weight_files(folder):
            with explain_library_errors(f"{folder / file_name} is not a complete safetensors file"):
                file = stack.enter_context(safe_open(folder / file_name, framework="pt"))
            slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  no mapping
        if head_is_embedding:
            slices.setdefault("lm_head.weight", slices["model.embed_tokens.weight"])
        filled: set[Tensor] = set()
        for name, parameter in model.state_dict(keep_vars=True).items():
            if parameter in filled:  # tied to one that was read
                continue
            filled.add(parameter)
            if (values := first_lora_values(name, parameter.shape)) is not None:
                read: Reader = values.__getitem__
            else:
                read = find_reader(name, list(parameter.shape), slices, folder)
            target, begin = own_rows(parameter)
            if target.numel():  # this rank's rows, converted from the file's type
                target.copy_(read(slice(begin, begin + target.shape[0])))

    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        config = getattr(module, "config", None)
        if buffers and config is None:
            raise UserError(
                f"{type(module).__name__} has buffers that are in no file, and no config to "
                "compute them from, so this model cannot be trained here. Pass another one."
            )
        # As in a new module. With a table of zeros a model would still train, a little worse.
        fresh = dict(type(module)(config).named_buffers(recurse=False)) if buffers else {}
        for name in buffers:
            assert bool(fresh[name].abs().sum() > 0), f"buffer {name} is all zeros"
            setattr(module, name, fresh[name].to(device))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert not tensor.is_meta, f"{name} was never filled"


Reader = Callable[[slice], Tensor]  # of the first dimension


def find_reader(name: str, shape: list[int], slices: dict[str, Any], folder: Path) -> Reader:
    """How to read a parameter's rows. The model has one tensor for the experts of a layer, with one
    row per expert. The files hold the experts one by one."""
    if name in slices:
        if (there := slices[name].get_shape()) != shape:
            raise UserError(
                f"{folder}: {name} has the shape {there}, but by config.json it would be {shape}. "
                "Pass a folder whose config.json belongs to its weights."
            )
        read: Reader = slices[name].__getitem__
        return read
    prefix, _, kind = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
    if parts is None or f"{prefix}.0.{parts[0]}.weight" not in slices:
        raise UserError(
            f"{folder} has no weights {name!r}, which its config.json asks for. It is incomplete "
            "or its config.json is that of another model."
        )

    def read_experts(rows: slice) -> Tensor:
        experts = [
            torch.cat([slices[f"{prefix}.{number}.{part}.weight"][:] for part in parts])
            for number in range(rows.start, rows.stop)
        ]
        return torch.stack(experts)

    return read_experts
