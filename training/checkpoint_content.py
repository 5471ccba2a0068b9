"""What a checkpoint holds, as torch.distributed.checkpoint (DCP) and JSON take it.

Every tensor goes to DCP under a flat name, `optimizer.model.norm.weight.exp_avg`; numbers and lists
go to a JSON file. DCP would pickle them, and reading a pickle runs whatever it names. Its own table
of contents, `.metadata`, is a pickle too: it is read with only DCP's own classes allowed.
"""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import _init_optim_state, get_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from bosch.run.errors import UserError

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # in parameters' names, of no meaning here


@dataclass(frozen=True)
class TrainState:
    """All that a step changes. Data order and learning rate are functions of the step."""

    model: nn.Module  # its parameters are DTensors, sharded by fully_shard
    optimizer: Optimizer
    extra: dict[str, Stateful] = field(default_factory=dict)  # the same on every rank


# ---------------------------------------------------------------------------------- there and back


def describe_state(state: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name, sharing memory with the state, and what else the extra parts hold."""
    # The model first: this also brings all parameters to their shards.
    tensors = {f"model.{name}": tensor for name, tensor in _model_tensors(state.model).items()}
    for name, parameter in _named_parameters(state):
        moments = state.optimizer.state.get(parameter, {})
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in moments.items()}
    rest: dict[str, Any] = {}
    for part_name, part in state.extra.items():
        rest[part_name] = {}
        for key, value in part.state_dict().items():
            if isinstance(value, Tensor):
                tensors[f"extra.{part_name}.{key}"] = value
            else:
                rest[part_name][key] = value
    return {name: tensor.detach() for name, tensor in tensors.items()}, {"extra": rest}


def prepare_optimizer(state: TrainState, names: set[str]) -> None:
    """Give a fresh optimizer the state for which there are tensors, to be loaded in place."""
    optimizer = state.optimizer
    if any(name.startswith("optimizer.") for name in names) and not optimizer.state:
        _init_optim_state(optimizer)  # by a step of no length
    for name, parameter in _named_parameters(state):
        # A parameter that never had a gradient has no moments.
        if not any(found.startswith(f"optimizer.{name}.") for found in names):
            optimizer.state.pop(parameter, None)


def restore_extra(state: TrainState, rest: Any, tensors: Mapping[str, Tensor]) -> None:
    """Hand their loaded values to the extra parts. Model and optimizer were loaded in place."""
    if rest["extra"].keys() != state.extra.keys():
        raise UserError(
            f"the checkpoint holds {sorted(rest['extra'])} beside model and optimizer, and this "
            f"run has {sorted(state.extra)}."
        )
    for name, part in state.extra.items():
        start = f"extra.{name}."
        own = {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}
        part.load_state_dict(rest["extra"][name] | own)


def compare_names(path: Path, wanted: Mapping[str, Tensor], there: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model. DCP alone would leave out, or cast, without a word."""
    for name in sorted(wanted.keys() | there.keys()):
        if name not in there:
            why = f"it lacks {name}, which this run's model or optimizer has"
        elif name not in wanted:
            why = f"it holds {name}, which this run's model or optimizer lacks"
        else:
            ours, found = wanted[name], there[name]
            mine, theirs = _kind(ours.shape, ours.dtype), _kind(found.size, found.properties.dtype)
            if mine == theirs:
                continue
            why = f"{name} is {theirs} in it and {mine} in this run"
        raise UserError(f"{path} does not fit: {why}.")


def _kind(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{' x '.join(map(str, shape)) or 'a number'} of {str(dtype).removeprefix('torch.')}"


def _model_tensors(model: nn.Module) -> dict[str, Any]:
    """Parameters, tied ones once, and the buffers that are saved."""
    tensors = get_model_state_dict(model)
    once = {plain_name(name) for name, _ in model.named_parameters()}
    again = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return {name: tensor for name, tensor in tensors.items() if name not in again}


def _named_parameters(state: TrainState) -> Iterator[tuple[str, nn.Parameter]]:
    """Those the optimizer moves: the model's, and what an extra module may bring along."""
    modules = {"": state.model}
    modules |= {f"{n}.": part for n, part in state.extra.items() if isinstance(part, nn.Module)}
    names = {
        parameter: prefix + plain_name(name)
        for prefix, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UserError(
                    "the optimizer moves a parameter that neither the model nor an extra module "
                    "has, so a checkpoint could not name it."
                )
            yield names[parameter], parameter


def plain_name(name: str) -> str:
    """A parameter's name without what checkpointing of activations and compilation put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# ------------------------------------------------------------------------------------ random state


def save_random_state(path: Path) -> None:
    """torch's generators in this process. Only dropout draws from them."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    with path.open("wb") as file:  # given a path, torch hides a full disk in an error of its own
        torch.save({"torch": torch.get_rng_state(), "cuda": cuda}, file)


def restore_random_state(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    torch.set_rng_state(content["torch"])
    if content["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(content["cuda"])


# ------------------------------------------------------------------------------- DCP's own contents


class CheckpointReader(FileSystemReader):
    """DCP's reader, whose table of contents may name no other classes than its own."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata MetadataIndex StorageMeta TensorStorageMetadata ChunkStorageMetadata "
        "TensorProperties _MEM_FORMAT_ENCODING".split()
    ),
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch": ["Size"],
    "torch.serialization": ["_get_layout"],
    "pathlib": ["PosixPath"],
    "pathlib._local": ["PosixPath"],  # where Python 3.13 keeps it
}


def _enum_member(kind: Any, name: str) -> Enum:
    """Python 3.11.2, Debian 12's, pickles a member of an enumeration as getattr(class, name)."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise UserError(f".metadata wants {name} of {kind}, which no checkpoint of ours does.")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise UserError(f".metadata names {module}.{name}, which no checkpoint of ours does.")
