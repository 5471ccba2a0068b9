"""The content of a checkpoint: tensors for torch.distributed.checkpoint (DCP), the rest as JSON.

Every tensor goes to DCP under a flat name, such as `optimizer.model.norm.weight.exp_avg`. Numbers
and lists go to a JSON file: DCP would pickle them, and loading a pickle can run any code. DCP's
table of contents, `.metadata`, is a pickle too. We load it allowing only DCP's own classes.
"""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import _init_optim_state, get_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from bosch.model import explain_library_errors
from bosch.run.errors import UserError
from bosch.run.inside import path_inside


@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes. Data order and learning rate are functions of the step."""

    model: nn.Module  # its parameters are DTensors, sharded by fully_shard
    optimizer: Optimizer
    extra: dict[str, Stateful] = field(default_factory=dict)  # the same on every rank


# ---------------------------------------------------------------------------------- there and back


def describe_state(state: TrainState) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The tensors by name, sharing memory with the state, and the other values of extra parts."""
    # The model first, since this also reshards all parameters.
    tensors = {f"model.{name}": tensor for name, tensor in _model_tensors(state.model).items()}
    for name, parameter in _named_parameters(state):
        moments = state.optimizer.state.get(parameter, {})
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in moments.items()}
    rest: dict[str, dict[str, object]] = {}
    for part_name, part in state.extra.items():
        rest[part_name] = {}
        for key, value in part.state_dict().items():
            if isinstance(value, Tensor):
                tensors[f"extra.{part_name}.{key}"] = value
            else:
                rest[part_name][key] = value
    return {name: tensor.detach() for name, tensor in tensors.items()}, {"extra": rest}


def prepare_optimizer(state: TrainState, names: set[str]) -> None:
    """Give a new optimizer the state that the checkpoint has tensors for, to load them in place."""
    optimizer = state.optimizer
    if any(name.startswith("optimizer.") for name in names) and not optimizer.state:
        _init_optim_state(optimizer)  # makes a step with learning rate 0
    for name, parameter in _named_parameters(state):
        # A parameter that never had a gradient has no moments.
        if not any(other.startswith(f"optimizer.{name}.") for other in names):
            optimizer.state.pop(parameter, None)


def restore_extra(
    path: Path, state: TrainState, rest: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Give the extra parts their loaded values. Model and optimizer were loaded in place."""
    if rest["extra"].keys() != state.extra.keys():
        parts, needed = (", ".join(sorted(names)) for names in (rest["extra"], state.extra))
        refuse_checkpoint(path, f"beside model and optimizer it has {parts}, this run {needed}")
    for name, part in state.extra.items():
        prefix = f"extra.{name}."
        loaded = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        part.load_state_dict(rest["extra"][name] | loaded)


def compare_names(
    path: Path, needed: Mapping[str, Tensor], there: Mapping[str, STORAGE_TYPES]
) -> None:
    """Refuse a checkpoint of another model. DCP alone would silently skip or convert tensors."""
    for name in sorted(needed.keys() | there.keys()):
        if name not in there:
            refuse_checkpoint(path, f"it lacks {name}, which this run's model or optimizer has")
        if name not in needed:
            refuse_checkpoint(path, f"it has {name}, which this run's model or optimizer lacks")
        ours, theirs = needed[name], there[name]
        assert isinstance(theirs, TensorStorageMetadata)
        mine, saved = _kind(ours.shape, ours.dtype), _kind(theirs.size, theirs.properties.dtype)
        if mine != saved:
            refuse_checkpoint(path, f"in it {name} is {saved}, in this run {mine}")


def refuse_checkpoint(path: Path, reason: str) -> NoReturn:
    raise UserError(
        f"{path} does not fit this run: {reason}. Delete {path.parent} to begin again, or write to "
        "another folder."
    )


def _kind(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{' x '.join(map(str, shape)) or 'a number'} of {str(dtype).removeprefix('torch.')}"


def _model_tensors(model: nn.Module) -> dict[str, Any]:
    """Parameters (tied ones once) and the buffers that are saved."""
    tensors = get_model_state_dict(model)
    once = {plain_name(name) for name, _ in model.named_parameters()}
    again = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return {name: tensor for name, tensor in tensors.items() if name not in again}


def _named_parameters(state: TrainState) -> Iterator[tuple[str, nn.Parameter]]:
    """Those in the optimizer: the model's, and those of extra parts that are modules."""
    modules = {"": state.model}
    modules |= {f"{n}.": part for n, part in state.extra.items() if isinstance(part, nn.Module)}
    names = {
        parameter: prefix + plain_name(name)
        for prefix, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            assert parameter in names, "the optimizer has a parameter of no module"
            yield names[parameter], parameter


def plain_name(name: str) -> str:
    """A parameter's name without the part that activation checkpointing adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


# ------------------------------------------------------------------------------------ random state


def save_random_state(path: Path) -> None:
    """The state of torch's generators in this process. Only dropout uses them."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    with path.open("wb") as file:  # given a path, torch would not say that the disk is full
        torch.save({"torch": torch.get_rng_state(), "cuda": cuda}, file)


def restore_random_state(path: Path) -> None:
    with explain_library_errors(f"{path} is not the state of torch's generators"):
        content = torch.load(path, weights_only=True)
        torch.set_rng_state(content["torch"])
        if content["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(content["cuda"])


# ------------------------------------------------------------------------------- DCP's own contents


class CheckpointReader(FileSystemReader):
    """DCP's reader, but its table of contents may only contain DCP's own classes, and name only
    files of the folder."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            try:
                metadata: Metadata = _MetadataUnpickler(file).load()
            except pickle.UnpicklingError as error:
                raise UserError(
                    f"{file.name} {error}, which no checkpoint of ours does. Somebody may have "
                    "changed it to run code: delete this checkpoint."
                ) from error
            except Exception as error:  # of the classes, about their arguments
                raise UserError(
                    f"{file.name} is damaged ({error}): delete this checkpoint."
                ) from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise UserError(f"{file.name} is no table of contents: delete this checkpoint.")
        for place in metadata.storage_data.values():
            name = getattr(place, "relative_path", None)
            path_inside(Path(self.path), name, Path(file.name), flat=True)
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
    "pathlib._local": ["PosixPath"],  # in Python 3.13
}


def _enum_member(kind: object, name: str) -> Enum:
    """Python 3.11.2 (in Debian 12) pickles a member of an enumeration as getattr(class, name)."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"asks for {name} of {kind}")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise pickle.UnpicklingError(f"names {module}.{name}")
