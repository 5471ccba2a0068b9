"""A reader of MDS shards of token ids, the format ProLong comes in. mosaicml-streaming, which
writes them, does not install beside this stack, and all that is needed of the format is this:

    index.json       for each shard: file, bytes, samples, names and encodings of the columns
    shard.00000.mds  u32 n, u32 offset[n + 1] from the file's start, JSON nobody needs, the samples
    a sample         u32 sizes of the columns whose size is not fixed, then the columns' bytes

Columns of ProLong: `input_ids`, and `indices`, the (start, end) of each document packed into the
sample (may be absent)."""

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bosch.data.sources.source import Document
from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import hash_file

Array = NDArray[Any]

INDEX = "index.json"
# The numbers with which an ndarray column without a fixed type says it.
VALUE_TYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}


@dataclass(frozen=True)
class Shard:
    """One file of samples, as its index describes it."""

    path: Path
    num_bytes: int
    num_samples: int
    columns: tuple[tuple[str, str, int | None], ...]  # name, encoding, size if it is fixed


class MdsSource:
    """The documents in the shards of a folder and its subfolders."""

    endless = False

    def __init__(self, folder: Path, tokenizer: str | None = None, column: str = "input_ids"):
        if tokenizer is None:
            raise UserError(
                f"mds:{folder} holds token ids, and does not say whose. A model trains on foreign "
                "ids without an error, so name their tokenizer: "
                "?tokenizer=meta-llama/Meta-Llama-3-8B for ProLong, or a folder with a "
                "tokenizer.json."
            )
        self.folder, self.column, self.name = folder, column, f"mds:{folder}"
        self.tokenizer: str | None = tokenizer

    @functools.cached_property
    def shards(self) -> list[Shard]:
        """All below the folder, by the path of their index and their order in it."""
        if not self.folder.is_dir():
            raise MissingFileError(
                f"{self.folder} is not a folder; MDS shards stand in one beside their {INDEX}."
            )
        indexes = sorted(self.folder.rglob(INDEX))
        shards = [shard for index in indexes for shard in read_index(index)]
        if not shards:
            raise UserError(
                f"{self.folder} holds no shard that an {INDEX} describes, so it is no MDS dataset."
            )
        return shards

    def facts(self) -> dict[str, Any]:
        paths = [shard.path for shard in self.shards]
        files = {path.relative_to(self.folder).as_posix(): hash_file(path) for path in paths}
        return {"source": "mds", "tokenizer": self.tokenizer, "column": self.column, "files": files}

    def read(self, start: int) -> Iterator[Document]:
        return read_documents(self.shards, self.column, start)


def read_documents(shards: Sequence[Shard], column: str, start: int) -> Iterator[Document]:
    """The documents of all samples, from number `start` on."""
    number = 0
    for shard in shards:
        for ids, spans in read_samples(shard, column):
            for begin, end in spans:
                if number >= start:
                    yield (ids[begin:end],)
                number += 1


def read_index(path: Path) -> list[Shard]:
    try:
        described = json.loads(path.read_bytes())["shards"]
        return [describe_shard(path, shard) for shard in described]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no index of MDS shards ({error!r}); fetch it again.") from error


def describe_shard(index: Path, told: dict[str, Any]) -> Shard:
    path = index.parent / Path(told["raw_data"]["basename"]).name
    if told["format"] != "mds" or told["version"] != 2:
        raise UserError(
            f"{path} is {told['format']} version {told['version']}; only mds version 2 can be read."
        )
    if told["compression"]:
        raise UserError(
            f"{path} is compressed ({told['compression']}), which is not supported; ProLong's "
            "shards are not. Unpack it first."
        )
    columns = tuple(
        zip(told["column_names"], told["column_encodings"], told["column_sizes"], strict=True)
    )
    for name, encoding, _ in columns:
        if encoding == "pkl":
            raise UserError(
                f"{path}: column {name!r} is a pickle, which could run any code when it is read; "
                "it is refused."
            )
    return Shard(path, int(told["raw_data"]["bytes"]), int(told["samples"]), columns)


def read_samples(
    shard: Shard, column: str
) -> Iterator[tuple[NDArray[np.uint32], list[tuple[int, int]]]]:
    """(ids, spans of the documents in them) of each sample."""
    names = [name for name, _, _ in shard.columns]
    if column not in names:
        raise UserError(f"{shard.path} has no column {column!r}: {suggest(column, names)}")
    data = map_shard(shard)
    offsets = read_offsets(shard, data)
    for number in range(shard.num_samples):
        try:
            sample = data[offsets[number] : offsets[number + 1]]
            values = read_columns(sample, shard, (column, "indices"))
            ids = check_ids(values[column])
            spans = check_spans(values.get("indices"), len(ids))
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise UserError(
                f"{shard.path} is damaged: sample {number}: {error}. Fetch the file again."
            ) from error
        yield ids, spans


def map_shard(shard: Shard) -> NDArray[np.uint8]:
    """The file's bytes, of which only those used are read."""
    if not shard.path.is_file():
        raise MissingFileError(
            f"{shard.path} is missing, though {shard.path.parent / INDEX} lists it; fetch it."
        )
    size = shard.path.stat().st_size
    if size != shard.num_bytes:
        raise UserError(
            f"{shard.path} is damaged: it has {size:,} bytes, its {INDEX} says "
            f"{shard.num_bytes:,}. Fetch the file again."
        )
    return np.memmap(shard.path, np.uint8, mode="r")


def read_offsets(shard: Shard, data: NDArray[np.uint8]) -> list[int]:
    count = shard.num_samples + 1
    head = np.frombuffer(data[: 4 + 4 * count], "<u4")
    offsets = head[1:].astype(np.int64)
    intact = (
        len(head) == count + 1
        and head[0] == shard.num_samples
        and offsets[0] >= 4 + 4 * count
        and bool((np.diff(offsets) >= 0).all())
        and offsets[-1] == len(data)
    )
    if not intact:
        raise UserError(
            f"{shard.path} is damaged: the table of samples at its start does not fit the "
            f"{shard.num_samples} samples of its {INDEX}. Fetch the file again."
        )
    return [int(offset) for offset in offsets]


def read_columns(
    sample: NDArray[np.uint8], shard: Shard, wanted: tuple[str, ...]
) -> dict[str, Array]:
    """The wanted columns of one sample, of those it has."""
    variable = [name for name, _, size in shard.columns if not size]
    sizes = dict(zip(variable, np.frombuffer(sample[: 4 * len(variable)], "<u4"), strict=True))
    position = 4 * len(variable)
    values = {}
    for name, encoding, fixed in shard.columns:
        size = fixed or int(sizes[name])
        if name in wanted:
            values[name] = decode_array(encoding, sample[position : position + size])
        position += size
    if position != len(sample):
        raise UserError(f"its columns take {position} bytes, and it has {len(sample)}")
    return values


def decode_array(encoding: str, data: NDArray[np.uint8]) -> Array:
    """An array from its bytes: `ndarray:type:shape`; what is not fixed stands before the values."""
    kind, *fixed = encoding.split(":")
    if kind == "bytes":
        return np.frombuffer(data.tobytes(), "<u4")
    if kind == "json":
        return np.array(json.loads(data.tobytes()), np.int64)
    if kind != "ndarray":
        raise UserError(
            f"a column of numbers is encoded as {encoding!r}; only ndarray, json and bytes "
            "(uint32) can be read"
        )
    if fixed and fixed[0]:
        value_type = np.dtype(fixed[0]).newbyteorder("<")
    else:
        value_type, data = np.dtype(VALUE_TYPES[int(data[0])]), data[1:]
    if len(fixed) > 1:
        shape = [int(size) for size in fixed[1].split(",")]
    else:
        # One byte: the number of dimensions, and in its two lowest bits the bytes (1, 2, 4, 8) of
        # each size behind it.
        num_dims, width = int(data[0]) >> 2, 1 << (int(data[0]) & 3)
        shape = [int(size) for size in data[1 : 1 + num_dims * width].view(f"<u{width}")]
        data = data[1 + num_dims * width :]
    return np.frombuffer(data.tobytes(), value_type).reshape(shape)


def check_ids(ids: Array) -> NDArray[np.uint32]:
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids.size and int(ids.min()) < 0):
        raise UserError(
            f"ids must be one row of whole numbers from 0 on, not {ids.dtype} of shape {ids.shape}"
        )
    return ids.astype(np.uint32)


def check_spans(indices: Array | None, num_ids: int) -> list[tuple[int, int]]:
    """Where a sample's documents are, in order. Without the column it is one document."""
    if indices is None:
        return [(0, num_ids)]
    spans = [(int(begin), int(end)) for begin, end in indices.reshape(-1, 2)]
    last = 0
    for begin, end in spans:
        if not last <= begin < end <= num_ids:
            raise UserError(
                f"its document ({begin}, {end}) is not behind {last} and within its {num_ids} ids"
            )
        last = end
    return spans
