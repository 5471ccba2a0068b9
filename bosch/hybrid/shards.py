"""A checkpoint's safetensors files, rewritten with their KV groups in another order, tensor by
tensor.

Reordering changes neither shapes nor types, so a file keeps its header and every tensor its place:
memory holds one tensor and its reordered copy at most, whatever the size of the file, and the way
back gives the original file byte for byte.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from bosch.hybrid.permute import Permutation, permute_groups
from bosch.model import read_json_object
from bosch.run.fingerprint import CHUNK_BYTES, fingerprint, hash_file
from bosch.run.manifest import sync_directory, write_atomically
from bosch.run.progress import track

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PROGRESS = ".shards.json"  # which files are complete; gone when all of the folder is
# Entries move as whole numbers of their size: any type goes through, and no bit of it changes.
WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
            raise ValueError(f"{folder / INDEX} has no weight_map.")
        names = sorted(set(index["weight_map"].values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE} nor {INDEX}; load the model with transformers and save "
            "it with save_pretrained to get them."
        )
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing, though {INDEX} lists it.")
    return names


def _read_progress(out: Path, job: str) -> dict[str, str]:
    """Checksums of the files that are complete and still what they were."""
    try:
        progress = read_json_object(out / PROGRESS)
    except FileNotFoundError:
        return {}
    if progress["job"] != job:
        return {}
    return {
        name: checksum
        for name, checksum in progress["files"].items()
        if (out / name).is_file() and hash_file(out / name) == checksum
    }


# ----------------------------------------------------------------------------------------- one file


@dataclass(frozen=True)
class Entry:
    """A tensor in a safetensors file."""

    name: str
    shape: list[int]
    num_bytes: int

    @property
    def number_type(self) -> torch.dtype:
        return WHOLE_NUMBERS[self.num_bytes // torch.Size(self.shape).numel()]


def _rewrite_file(
    source: Path, target: Path, permutation: Permutation | None, head_size: int
) -> str:
    """The checksum of what was written: the whole file, or none of it under its name."""
    temporary = target.with_name(f".{target.name}.tmp")
    digest = xxhash.xxh3_128()
    with source.open("rb") as reader, temporary.open("wb") as writer:
        for piece in _pieces(reader, source, permutation, head_size):
            digest.update(piece)
            writer.write(piece)
        writer.flush()
        os.fsync(writer.fileno())
    os.replace(temporary, target)
    sync_directory(target.parent)
    return digest.hexdigest()


def _pieces(
    reader: BinaryIO, path: Path, permutation: Permutation | None, head_size: int
) -> Iterator[Any]:
    """The bytes of the new file, in order."""
    header, entries = _read_header(reader, path)
    yield header
    for entry in entries:
        if permutation is not None and ".self_attn." in entry.name and entry.num_bytes:
            tensor = _read_tensor(reader, entry)
            yield permute_groups(entry.name, tensor, permutation, head_size).numpy().data.cast("B")
        else:
            left = entry.num_bytes
            while left:
                piece = reader.read(min(left, CHUNK_BYTES))
                left -= len(piece)
                yield piece


def _read_tensor(reader: BinaryIO, entry: Entry) -> Tensor:
    content = bytearray(entry.num_bytes)
    reader.readinto(content)  # type: ignore[attr-defined]  # a buffered file has it
    return torch.frombuffer(content, dtype=entry.number_type).view(entry.shape)


def _read_header(reader: BinaryIO, path: Path) -> tuple[bytes, list[Entry]]:
    """The bytes in front of the tensors, and the tensors in the order they lie in the file."""
    _check_file(path)
    length = reader.read(8)
    header = reader.read(int.from_bytes(length, "little"))
    told = json.loads(header)
    told.pop("__metadata__", None)
    placed = sorted(told.items(), key=lambda item: item[1]["data_offsets"])
    entries = [
        Entry(name, info["shape"], info["data_offsets"][1] - info["data_offsets"][0])
        for name, info in placed
    ]
    return length + header, entries


def _check_file(path: Path) -> None:
    """Let the library judge the header: lengths that fit, no gaps, nothing twice."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}.") from error
