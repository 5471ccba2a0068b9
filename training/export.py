"""The model of one step as an ordinary Hugging Face folder, written while its weights stay sharded.

The folder is the twin of the one training began with: the same files, names, types and order of
tensors, with the weights of now. Each file is written by one rank, tensor by tensor, and a tensor
is whole only while it is written.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from bosch.hybrid.materialize import copy_companions
from bosch.hybrid.shards import weight_files
from bosch.run.fingerprint import fingerprint, hash_file
from bosch.run.group import Group
from bosch.run.manifest import MANIFEST, provenance, sync_directory, write_sealed_json
from training.checkpoint_content import plain_name

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What copy_companions leaves behind because it makes it anew; here it is the source's own.
OF_THE_SOURCE = ("config.json", "README.md", "mask.png", "model.safetensors.index.json", "*.py")


def export_model(model: Any, source_folder: Path, folder: Path, ranks: Group) -> None:
    """Write the model to `folder`. Every rank calls this. A folder that is complete is left as it
    is; one that a kill left half-written is made anew."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    if not ranks.from_rank_0(lambda: _begin(folder, temporary)):
        return
    weights = Weights(model, source_folder)
    files: dict[str, Any] = {}
    for number, name in enumerate(weight_files(source_folder)):
        writes = number % ranks.world == ranks.rank
        files[name] = write_weight_file(
            source_folder / name, temporary / name if writes else None, weights
        )
    written: list[Any] = ranks.gather({name: told for name, told in files.items() if told})
    ranks.from_rank_0(lambda: _complete(source_folder, temporary, folder, written))


def _begin(folder: Path, temporary: Path) -> bool:
    if (folder / MANIFEST).is_file():
        return False
    for leftover in (temporary, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    return True


def _complete(source: Path, temporary: Path, folder: Path, written: list[dict[str, Any]]) -> None:
    copy_companions(source, temporary)
    for pattern in OF_THE_SOURCE:
        for path in source.glob(pattern):
            shutil.copyfile(path, temporary / path.name)
    files = {name: told for part in written for name, told in part.items()}
    for path in sorted(temporary.rglob("*")):
        name = path.relative_to(temporary).as_posix()
        if path.is_file() and name not in files:
            files[name] = {"bytes": path.stat().st_size, "xxh3": hash_file(path, sync=True)}
    manifest = {"fingerprint": fingerprint(files), "source": str(source)}
    write_sealed_json(temporary / MANIFEST, manifest | provenance() | {"files": files})
    temporary.rename(folder)
    sync_directory(folder.parent)


# -------------------------------------------------------------------------------------- one file


def write_weight_file(source: Path, target: Path | None, weights: "Weights") -> dict[str, Any]:
    """A safetensors file with the header of `source`; its size and checksum. None: take part in
    bringing the tensors together, and write nothing."""
    header, entries = read_header(source)
    if target is None:
        for name, told in entries:
            weights.gather(name, DTYPES[told["dtype"]])
        return {}
    digest = xxhash.xxh3_128()
    with target.open("wb") as file:
        _write(file, digest, header)
        for name, told in entries:
            tensor = weights.gather(name, DTYPES[told["dtype"]])
            if list(tensor.shape) != told["shape"]:
                raise ValueError(
                    f"{name} has the shape {list(tensor.shape)} in training and {told['shape']} in "
                    f"{source}."
                )
            values = tensor.cpu().contiguous().flatten().view(torch.uint8)
            _write(file, digest, values.numpy().data)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "xxh3": digest.hexdigest()}


def _write(file: BinaryIO, digest: Any, content: Any) -> None:
    digest.update(content)
    file.write(content)


def read_header(path: Path) -> tuple[bytes, list[tuple[str, dict[str, Any]]]]:
    """The bytes in front of the tensors; names, types and shapes in the order of the tensors."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
    told = json.loads(header)
    told.pop("__metadata__", None)
    for name, entry in told.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} is of type {entry['dtype']}, which is not trained.")
    return length + header, sorted(told.items(), key=lambda item: item[1]["data_offsets"])


# -------------------------------------------------------------------------------------- the weights


class Weights:
    """A sharded model's tensors under the names that its files have for them.

    The experts of a layer are one tensor in the model and many in the files.
    """

    def __init__(self, model: Any, source: Path) -> None:
        self._model = model
        tensors: Any = get_model_state_dict(model)
        self._tensors: Mapping[str, Tensor] = tensors
        self._owner = {
            name: key
            for key, tensor in tensors.items()
            for name in self._as_in_files(key, torch.empty_like(tensor, device="meta"))
        }
        self._recent: dict[str, Mapping[str, Tensor]] = {}
        self._check(source)

    def gather(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor of a file, whole. Every rank calls this for the same tensors in the same
        order."""
        key = self._owner[name]
        if key not in self._recent:
            if len(self._recent) == 2:  # a layer's experts are two tensors, whose parts alternate
                del self._recent[next(iter(self._recent))]
            self._recent[key] = self._as_in_files(key, _whole(self._tensors[key].to(dtype)))
        return self._recent[key][name]

    def _as_in_files(self, key: str, tensor: Tensor) -> Mapping[str, Tensor]:
        pieces: Mapping[str, Tensor] = revert_weight_conversion(self._model, {key: tensor})
        return pieces

    def _check(self, source: Path) -> None:
        """Nothing of the model may stay behind, and nothing of the files be made up."""
        in_files = {
            name for file in weight_files(source) for name, _ in read_header(source / file)[1]
        }
        if unknown := sorted(in_files - self._owner.keys()):
            raise ValueError(f"{source} has {unknown[0]}, which the trained model lacks.")
        written = {self._owner[name] for name in in_files}
        for names in _names_by_parameter(self._model):
            if not written & names and names <= self._tensors.keys():
                raise ValueError(f"the model has {min(names)}, for which {source} has no place.")


def _names_by_parameter(model: nn.Module) -> Iterable[set[str]]:
    """Names of each parameter; tied ones have several."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(plain_name(name))
    return names.values()


def _whole(tensor: Any) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    on_device: Any = tensor.to(tensor.device_mesh.device_type)  # an offloaded one is on the CPU
    whole: Tensor = on_device.full_tensor()
    return whole
