"""Rewrites a checkpoint's safetensors files one by one, with their KV groups in another order.

safetensors maps the old file into memory, so only the reordered tensors of one file take room, plus
mapped pages that the system can reclaim. Measured with safetensors 0.8: 51 and 230 MB for a file of
240 MB, 22 and 60 MB for files of 60 MB.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bosch.hybrid.permute import HeadDimensions, Permutation, permute_groups
from bosch.hybrid.sinks import is_sink
from bosch.model_files import INDEX, read_json_object, weight_names
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import path_inside, sync_directory, temporary_file, write_atomically
from bosch.run.fingerprint import fingerprint, hash_file
from bosch.run.progress import track

SINGLE = "model.safetensors"
# Which files are complete, by checksum. Removed once the whole folder is, or if it is to be written
# anew.
PROGRESS = ".shards.json"


def rewrite_weights(
    source: Path,
    out: Path,
    permutation: Permutation | None,
    head_size: int,
    further: HeadDimensions | None = None,
    sinks: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the weights of the folder `source` to `out`, permuted; None: unchanged. `further`: as
    for permute_groups. `sinks`: parameters of the hybrid that the source lacks; those of the source
    do not go into a permuted copy.

    Can be restarted at any point: files whose checksum shows that they are complete are kept.
    """
    names = weight_files(source)
    sizes = {name: (source / name).stat().st_size for name in names}
    added = {name: tensor.float().tolist() for name, tensor in (sinks or {}).items()}
    job = fingerprint(
        {"permutation": permutation, "head_size": head_size, "files": sizes}
        | ({"sinks": added} if added else {})
    )
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
                raise UserError(
                    f"{source / name} is not a complete safetensors file ({error}); fetch or copy "
                    "it once more."
                ) from error
            if permutation is None:
                shutil.copyfile(source / name, temporary)
            else:
                tensors = {
                    key: permute_groups(key, tensor, permutation, head_size, further)
                    for key, tensor in load_file(source / name).items()
                    if not is_sink(key)
                }
                for key, tensor in (sinks or {}).items():  # beside the layer's other weights
                    neighbor = tensors.get(key.rpartition(".")[0] + ".k_proj.weight")
                    if neighbor is not None:
                        tensors[key] = tensor.to(neighbor.dtype)
                save_weights(tensors, temporary, metadata)
            done[name] = hash_file(temporary, sync=True)
            os.replace(temporary, out / name)
            sync_directory(out)
            write_atomically(out / PROGRESS, json.dumps({"job": job, "files": done}))
            bar.advance()
    if (source / INDEX).is_file():
        content = (source / INDEX).read_bytes()
        places = json.loads(content)["weight_map"]
        if sinks or (permutation is not None and any(map(is_sink, places))):
            kept = {key: name for key, name in places.items() if not is_sink(key)}
            for key in sinks or {}:
                kept[key] = places[key.rpartition(".")[0] + ".k_proj.weight"]
            index = {"metadata": {}, "weight_map": dict(sorted(kept.items()))}
            content = (json.dumps(index, indent=2) + "\n").encode()
        write_atomically(out / INDEX, content)


def weight_files(folder: Path) -> list[str]:
    """The files that transformers loads: those in the index, or the single one."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise MissingFileError(
                f"{folder} has neither {SINGLE} nor {INDEX}, so the model has no weights; to get "
                "them, load it with transformers and save it with save_pretrained."
            )
        return [SINGLE]
    names = weight_names(folder / INDEX)
    for name in names:
        if not (folder / name).is_file():
            raise MissingFileError(f"{folder / name} is missing, though {INDEX} lists it.")
    return names


def save_weights(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None) -> None:
    """Write a safetensors file that others may read as they may read our other files; safetensors
    alone would let only its owner."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # also for a full disk
        raise UserError(
            f"{path} cannot be written: {error}. Free some space (or fix the cause) and run the "
            "same command again."
        ) from error
    path.chmod(mode)
