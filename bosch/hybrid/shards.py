"""A checkpoint's safetensors files, rewritten one by one with their KV groups in another order.

The library maps the old file and writes the new one from there: memory holds the reordered tensors
of one file, and its mapped pages as long as nobody else needs the room. Measured with safetensors
0.8: 51 and 230 MB for a file of 240 MB, 22 and 60 MB for files of 60 MB.
"""

import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from bosch.hybrid.permute import Permutation, permute_groups
from bosch.model import read_json_object
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import fingerprint, hash_file
from bosch.run.manifest import sync_directory, write_atomically
from bosch.run.progress import track

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PROGRESS = ".shards.json"  # which files are complete; gone when all of the folder is


def rewrite_weights(
    source: Path, out: Path, permutation: Permutation | None, head_size: int
) -> None:
    """Write the weights of the folder `source` to `out`. None: as they are.

    Runs again from any point: files that are complete, by their checksum, are kept.
    """
    names = weight_files(source)
    sizes = {name: (source / name).stat().st_size for name in names}
    job = fingerprint({"permutation": permutation, "head_size": head_size, "files": sizes})
    done = _read_progress(out, job)
    with track("weights", total=len(names), unit="files", done=len(done)) as bar:
        for name in names:
            if name not in done:
                done[name] = _rewrite_file(source / name, out / name, permutation, head_size)
                write_atomically(out / PROGRESS, json.dumps({"job": job, "files": done}))
                bar.advance()
    if (source / INDEX).is_file():
        write_atomically(out / INDEX, (source / INDEX).read_bytes())


def forget_progress(out: Path) -> None:
    """The next `rewrite_weights` begins anew; or the folder is done and needs no book-keeping."""
    (out / PROGRESS).unlink(missing_ok=True)


def weight_files(folder: Path) -> list[str]:
    """The files transformers loads: those of the index, or the only one."""
    if (folder / INDEX).is_file():
        index = read_json_object(folder / INDEX)
        if not isinstance(index.get("weight_map"), dict):
            raise UserError(f"{folder / INDEX} has no weight_map.")
        names = sorted(set(index["weight_map"].values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise MissingFileError(
            f"{folder} has neither {SINGLE} nor {INDEX}; load the model with transformers and save "
            "it with save_pretrained to get them."
        )
    for name in names:
        if not (folder / name).is_file():
            raise MissingFileError(f"{folder / name} is missing, though {INDEX} lists it.")
    return names


def _read_progress(out: Path, job: str) -> dict[str, str]:
    """Checksums of the files that are complete and still what they were."""
    if not (out / PROGRESS).is_file():
        return {}
    progress = read_json_object(out / PROGRESS)
    if progress["job"] != job:
        return {}
    return {
        name: checksum
        for name, checksum in progress["files"].items()
        if (out / name).is_file() and hash_file(out / name) == checksum
    }


def _rewrite_file(
    source: Path, target: Path, permutation: Permutation | None, head_size: int
) -> str:
    """The checksum of what was written: the whole file, or none of it under its name."""
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata()
    except SafetensorError as error:
        raise UserError(f"{source} is not a whole safetensors file: {error}.") from error
    if permutation is None:
        shutil.copyfile(source, temporary)
    else:
        tensors = {
            name: permute_groups(name, tensor, permutation, head_size)
            for name, tensor in load_file(source).items()
        }
        save_file(tensors, temporary, metadata)
    checksum = hash_file(temporary, sync=True)
    os.replace(temporary, target)
    sync_directory(target.parent)
    return checksum
