"""Rewrites a checkpoint's safetensors files one by one, with their KV groups in another order.

safetensors maps the old file into memory, so only the reordered tensors of one file take room, plus
mapped pages that the system can reclaim: 51 and 230 MB for a file of 240 MB (safetensors 0.8).
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from bosch.hybrid.conversion import Permutation, permute_groups
from bosch.hybrid.models import head_size
from bosch.model_files import INDEX, hash_weights, read_json_object, weight_names
from bosch.run.errors import FREE_SPACE, MissingFileError, UserError
from bosch.run.files import path_inside, sync_directory, temporary_file, write_atomically
from bosch.run.fingerprint import fingerprint, hash_file
from bosch.run.progress import track
from bosch.sink import is_sink_parameter

QUERIES_AND_KEYS = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.[qk]_proj\.(?:weight|bias)$")
SINGLE = "model.safetensors"
PROGRESS = ".shards.json"  # which files are complete, by checksum; removed once the whole folder is


def rewrite_weights(
    source: Path,
    out: Path,
    config: PretrainedConfig,
    permutation: Permutation | None,
    constants: Mapping[str, Tensor] | None = None,
    dense: Path | None = None,
) -> None:
    """Write the weights of the folder `source` to `out`, permuted; None: unchanged. `constants`:
    parameters of a hybrid's sink, which the source lacks; those of the source do not go into a
    permuted copy. `dense`: folder of the model that gives a hybrid its queries and keys of groups
    on full attention back. Can be restarted at any point: files that are complete, by their
    checksums, are kept.
    """
    names = weight_files(source)
    constants = named_as_in(source, constants or {})
    # Beside which parameter of the source each constant goes: the layer may be in any file.
    neighbors = {key: neighbor_of(key) for key in constants}
    files = {name: (source / name).stat().st_size for name in names}
    # What decides the files: progress that another job has left here is not continued.
    facts: dict[str, object] = {
        "permutation": permutation,
        "head_size": head_size(config),
        "files": files,
    }
    if dense is not None:
        facts["dense"] = hash_weights(dense)
    if constants:
        facts["sinks"] = {name: tensor.float().tolist() for name, tensor in constants.items()}
    job = fingerprint(facts)
    done: dict[str, str] = {}
    progress = read_json_object(out / PROGRESS) if (out / PROGRESS).is_file() else {}
    if progress.get("job") == job:
        for name, checksum in progress["files"].items():
            file = path_inside(out, name, out / PROGRESS, flat=True)
            if file.is_file() and hash_file(file) == checksum:
                done[name] = checksum

    with track("weights", total=len(names), unit="files", done=len(done)) as bar:
        for name in names:
            if name in done:
                continue
            temporary = temporary_file(out / name)
            try:
                with safe_open(source / name, framework="pt") as opened:
                    metadata = opened.metadata()
            except SafetensorError as error:
                problem = f"{source / name} is not a complete safetensors file ({error})"
                raise UserError(f"{problem}; fetch or copy it once more.") from error
            if dense is not None:
                tensors = load_file(source / name)
                for key in tensors:
                    tensors[key] = with_dense_rows(key, tensors[key], dense, config)
                save_weights(tensors, temporary, metadata)
            elif permutation is None:
                shutil.copyfile(source / name, temporary)
            else:
                tensors = {
                    key: permute_groups(key, tensor, permutation, config)
                    for key, tensor in load_file(source / name).items()
                    if not is_sink_parameter(key)
                }
                for key, tensor in constants.items():
                    if (neighbor := tensors.get(neighbors[key])) is not None:
                        tensors[key] = tensor.to(neighbor.dtype)
                save_weights(tensors, temporary, metadata)
            # On the disk first, then under its name, then in the list of what is done: after a
            # crash of the machine, a file in the list is whole.
            done[name] = hash_file(temporary, sync=True)
            os.replace(temporary, out / name)
            sync_directory(out)
            write_atomically(out / PROGRESS, json.dumps({"job": job, "files": done}))
            bar.advance()
    if (source / INDEX).is_file():
        content = (source / INDEX).read_bytes()
        places = json.loads(content)["weight_map"]
        if constants or (permutation is not None and any(map(is_sink_parameter, places))):
            kept = {key: name for key, name in places.items() if not is_sink_parameter(key)}
            kept |= {key: places[neighbors[key]] for key in constants}
            index = {"metadata": {}, "weight_map": dict(sorted(kept.items()))}
            content = (json.dumps(index, indent=2) + "\n").encode()
        write_atomically(out / INDEX, content)


def neighbor_of(constant: str) -> str:
    return constant.rpartition(".")[0] + ".o_proj.weight"


def named_as_in(source: Path, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The constants of a sink under the names that the source's own weights would have: `model.`
    is missing in a folder that was saved from a model without its head."""
    known = set[str]()
    for file in weight_files(source) if constants else ():
        with safe_open(source / file, framework="pt") as opened:
            known |= {*opened.keys()}
    found = {}
    for key, tensor in constants.items():
        name = next((k for k in (key, key.removeprefix("model.")) if neighbor_of(k) in known), None)
        if name is None:
            raise UserError(f"{source} has no weights {neighbor_of(key)!r}, beside which sinks go.")
        found[name] = tensor
    return found


def with_dense_rows(key: str, trained: Tensor, dense: Path, config: PretrainedConfig) -> Tensor:
    """A tensor of a hybrid in which queries and keys of groups on full attention are those of the
    dense model; any other unchanged."""
    match = QUERIES_AND_KEYS.search(key)
    if match is None:
        return trained
    groups, layer = config.num_key_value_heads, int(match[1])
    rows = len(trained) // groups * config.bosch["num_full"][layer]  # they come first
    original = read_tensor(dense, key)
    if original.shape != trained.shape:
        problem = f"{dense}: {key} has the shape {tuple(original.shape)}"
        raise UserError(f"{problem}, the hybrid's {tuple(trained.shape)}; name its dense model.")
    ordered = permute_groups(key, original, config.bosch["permutation"], config)
    return torch.cat([ordered[:rows].to(trained.dtype), trained[rows:]])


def read_tensor(folder: Path, key: str) -> Tensor:
    for name in weight_files(folder):
        with safe_open(folder / name, framework="pt") as file:
            if key in file.keys():  # noqa: SIM118  no mapping
                tensor: Tensor = file.get_tensor(key)
                return tensor
    raise UserError(f"{folder} has no weights {key!r}; name the model that the hybrid was made of.")


def weight_files(folder: Path) -> list[str]:
    """The files that transformers loads: those in the index, or the single one."""
    has_index = (folder / INDEX).is_file()
    if not has_index and not (folder / SINGLE).is_file():
        problem = f"{folder} has neither {SINGLE} nor {INDEX}, so the model has no weights"
        raise MissingFileError(f"{problem}; load and save it with transformers.")
    names = weight_names(folder / INDEX) if has_index else [SINGLE]
    for name in names:
        if not (folder / name).is_file():
            raise MissingFileError(f"{folder / name} is missing, though {INDEX} lists it.")
    return names


def save_weights(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None) -> None:
    """Write a safetensors file. Others may read it as they may read our other files."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # also for a full disk
        problem = f"{path} cannot be written: {error}"
        raise UserError(f"{problem}. {FREE_SPACE}") from error
    path.chmod(mode)
