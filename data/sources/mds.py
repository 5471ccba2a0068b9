"""Reads MDS shards of token ids, ProLong's format. mosaicml-streaming, which writes them, cannot be
installed beside our packages. This is all we need of the format:

    index.json       for each shard: file, bytes, samples, names and encodings of the columns
    shard.00000.mds  u32 n, u32 offset[n + 1] from the file's start, JSON (not read), the samples
    a sample         u32 sizes of the columns whose size is not fixed, then the columns' bytes

ProLong's columns: `input_ids`, and (optional) `indices`, the (start, end) of each document in the
sample."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bosch.data.sources.source import Document
from bosch.run.errors import MissingFileError, UserError
from bosch.run.inside import path_inside

Array = NDArray[Any]

INDEX = "index.json"
IDS = "input_ids"
# The byte by which an ndarray column without a fixed type names its type.
VALUE_TYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}


@dataclass(frozen=True)
class Shard:
    """One file of samples, as its index describes it."""

    path: Path
    num_bytes: int
    num_samples: int
    columns: tuple[tuple[str, str, int | None], ...]  # name, encoding, bytes if they are fixed


def read_documents(shards: Sequence[Shard], start: int) -> Iterator[Document]:
    """The documents of all samples, from number `start` on."""
    number = 0
    for shard in shards:
        for ids, spans in read_samples(shard):
            for begin, end in spans:
                if number >= start:
                    yield (ids[begin:end],)
                number += 1


def read_index(path: Path) -> list[Shard]:
    try:
        return [describe_shard(path, entry) for entry in json.loads(path.read_bytes())["shards"]]
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no index of MDS shards ({error!r}); fetch it again.") from error


def describe_shard(index: Path, entry: dict[str, Any]) -> Shard:
    path = path_inside(index.parent, entry["raw_data"]["basename"], index, flat=True)
    if entry["format"] != "mds" or entry["version"] != 2:
        raise UserError(
            f"{path} is {entry['format']} version {entry['version']}; only mds version 2 can be "
            "read."
        )
    if entry["compression"]:
        raise UserError(
            f"{path} is compressed ({entry['compression']}), which is not supported. Decompress it "
            "first."
        )
    described = zip(
        entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True
    )
    columns = tuple((str(name), str(encoding), size) for name, encoding, size in described)
    for name, encoding, _ in columns:
        if encoding == "pkl":
            raise UserError(
                f"{path}: column {name!r} is a pickle. Reading one can run any code, so it is "
                "refused."
            )
    return Shard(path, int(entry["raw_data"]["bytes"]), int(entry["samples"]), columns)


def read_samples(shard: Shard) -> Iterator[tuple[NDArray[np.uint32], list[tuple[int, int]]]]:
    """(ids, spans of the documents in them) of each sample."""
    names = [name for name, _, _ in shard.columns]
    if IDS not in names:
        raise UserError(f"{shard.path} has no column {IDS!r}, only {', '.join(names)}.")
    data = map_shard(shard)
    offsets = read_offsets(shard, data)
    for number in range(shard.num_samples):
        try:
            sample = data[offsets[number] : offsets[number + 1]]
            values = read_columns(sample, shard)
            ids = check_ids(values[IDS])
            spans = check_spans(values.get("indices"), len(ids))
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise UserError(
                f"{shard.path} is damaged: sample {number}: {error}. Fetch the file again."
            ) from error
        yield ids, spans


def map_shard(shard: Shard) -> NDArray[np.uint8]:
    """The file's bytes, memory-mapped."""
    if not shard.path.is_file():
        raise MissingFileError(
            f"{shard.path} is missing, though {shard.path.parent / INDEX} lists it; fetch it."
        )
    size = shard.path.stat().st_size
    if size != shard.num_bytes or not size:
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
            f"{shard.path} is damaged: the sample table at its start does not match the "
            f"{shard.num_samples} samples in its {INDEX}. Fetch the file again."
        )
    return [int(offset) for offset in offsets]


def read_columns(sample: NDArray[np.uint8], shard: Shard) -> dict[str, Array]:
    """Those of ProLong's columns that the sample has."""
    variable = [name for name, _, size in shard.columns if not size]
    sizes = dict(zip(variable, np.frombuffer(sample[: 4 * len(variable)], "<u4"), strict=True))
    position = 4 * len(variable)
    values = {}
    for name, encoding, fixed in shard.columns:
        size = fixed or int(sizes[name])
        if name in (IDS, "indices"):
            values[name] = decode_array(encoding, sample[position : position + size])
        position += size
    if position != len(sample):
        raise UserError(f"its columns take {position} bytes, but it has {len(sample)}")
    return values


def decode_array(encoding: str, data: NDArray[np.uint8]) -> Array:
    """An array from its bytes. The encoding is `ndarray:type:shape`; a type or shape that it leaves
    out is stored before the values."""
    kind, *fixed = encoding.split(":")
    if kind != "ndarray":
        raise UserError(f"numbers are encoded as {encoding!r}; only ndarray can be read")
    if fixed and fixed[0]:
        value_type = np.dtype(fixed[0]).newbyteorder("<")
    else:
        value_type, data = np.dtype(VALUE_TYPES[int(data[0])]), data[1:]
    if len(fixed) > 1:
        shape = [int(size) for size in fixed[1].split(",")]
    else:
        # One byte: the number of dimensions, and in its two lowest bits how many bytes (1, 2, 4, 8)
        # each of the sizes after it takes.
        num_dims, width = int(data[0]) >> 2, 1 << (int(data[0]) & 3)
        shape = [int(size) for size in data[1 : 1 + num_dims * width].view(f"<u{width}")]
        data = data[1 + num_dims * width :]
    return np.frombuffer(data.tobytes(), value_type).reshape(shape)


def check_ids(ids: Array) -> NDArray[np.uint32]:
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids.size and int(ids.min()) < 0):
        raise UserError(
            f"ids must be a list of whole numbers from 0 on, not {ids.dtype} of shape {ids.shape}"
        )
    return ids.astype(np.uint32)


def check_spans(indices: Array | None, num_ids: int) -> list[tuple[int, int]]:
    """Where a sample's documents are, in order. Without the column the sample is one document."""
    if indices is None:
        return [(0, num_ids)]
    spans = [(int(begin), int(end)) for begin, end in indices.reshape(-1, 2)]
    last = 0
    for begin, end in spans:
        if not last <= begin < end <= num_ids:
            raise UserError(
                f"its document ({begin}, {end}) does not start at {last} or later and end within "
                f"its {num_ids} ids"
            )
        last = end
    return spans
