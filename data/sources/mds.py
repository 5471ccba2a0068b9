"""ProLong's training data: MDS shards of token ids, on the Hugging Face hub or in a local copy
(`?folder=DIR`). Each domain is a source, and only as many of its shards are downloaded as the
budget needs.

mosaicml-streaming, which writes MDS, cannot be installed beside our packages. This is all we need
of the format:

    index.json       for each shard: file, bytes, samples, names and encodings of the columns
    shard.00000.mds  u32 n, u32 offset[n + 1] from the file's start, JSON (not read), the samples
    a sample         u32 sizes of the columns whose size is not fixed, then the columns' bytes

ProLong's columns: `input_ids`, and (optional) `indices`, the (start, end) of each document in the
sample."""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bosch.data.sources.hub import asking_the_hub
from bosch.data.sources.source import Document, Source, write_address
from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import path_inside
from bosch.run.fingerprint import hash_file

REPOSITORIES = {
    "prolong-64k": "princeton-nlp/prolong-data-64K",
    "prolong-512k": "princeton-nlp/prolong-data-512K",
}
LLAMA_3 = "meta-llama/Meta-Llama-3-8B"

# The share of tokens from each domain in ProLong's first stage, from its train_64K.sh.
MIX_64K = {
    "thestackv1_concat_by_repo-65536": 0.3,
    "book-65536": 0.3,
    "fineweb-edu": 0.1,
    "fineweb-2023-50": 0.1,
    "stackexchange": 0.04,
    "dolmawiki": 0.04,
    "tuluv2": 0.03,
    "arxiv": 0.03,
    "openwebmath": 0.03,
    "textbooks": 0.03,
}

# Llama-3 ids to fetch for each token of the budget: other tokenizers may make fewer tokens of the
# same text, and some are held out.
MARGIN = 1.15
BYTES_PER_ID = 4

INDEX, IDS, SPANS = "index.json", "input_ids", "indices"
# The byte by which an ndarray column without a fixed type names its type.
VALUE_TYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}


@dataclass(frozen=True)
class Shard:
    """One file of samples, as its index describes it."""

    path: Path
    num_bytes: int
    num_samples: int
    columns: tuple[tuple[str, str, int | None], ...]  # name, encoding, bytes if they are fixed


class ProLongSource(Source):
    """Documents of one domain (`prolong-64k/book-65536`), in the order of folders and shards."""

    def __init__(
        self, address: str, tokens: int | None, tokenizer: str = LLAMA_3, folder: str | None = None
    ):
        repository, _, self.domain = address.partition("/")
        if not self.domain:
            raise UserError(f"{address} must name a domain, as in {address}/book-65536.")
        if folder is None and tokens is None:
            raise UserError(f"{address} would download the whole domain; give --tokens.")
        if folder is not None and not Path(folder).is_dir():
            raise MissingFileError(f"{folder} is not a folder with a copy of ProLong's domains.")
        options = {"tokenizer": tokenizer if tokenizer != LLAMA_3 else None, "folder": folder}
        self.name = write_address(address, options)
        self.repository, self.copy, self.tokens = REPOSITORIES[repository], folder, tokens
        self.tokenizer = tokenizer
        self.is_local = folder is not None
        self._indexes, self._pinned = f"{self.domain}/*{INDEX}", ""  # a pattern, a commit

    def facts(self) -> dict[str, object]:
        shards: dict[str, int | str] = {}
        # A commit says what a shard on the hub holds. One's own copy may be written again, so its
        # content counts.
        for s in self.shards:
            is_own = self.is_local and s.path.is_file()
            name = f"{s.path.parent.name}/{s.path.name}"
            shards[name] = hash_file(s.path) if is_own else s.num_bytes
        facts = {"source": "prolong", "domain": self.domain, "tokenizer": self.tokenizer}
        if not self.is_local:
            facts |= {"repository": self.repository, "commit": self.commit}
        return facts | {"shards": shards}

    @functools.cached_property
    def shards(self) -> list[Shard]:
        """The domain's first shards, fetched: as many as hold the budget and a margin, or all."""
        root = self._fetch(self._indexes)
        indexes = sorted((root / self.domain).rglob(INDEX), key=lambda path: path.as_posix())
        if not indexes:
            domains = sorted({*MIX_64K, *(path.name for path in root.glob("*/"))})
            nearest = suggest(self.domain, domains)
            raise UserError(f"ProLong has no domain {self.domain!r}: {nearest}")
        shards: list[Shard] = []
        num_ids = 0
        # The sizes in the indexes say how many ids a shard has, before any of them is fetched.
        for shard in (shard for index in indexes for shard in read_index(index)):
            if self.tokens is not None and num_ids >= self.tokens * MARGIN:
                break
            shards.append(shard)
            num_ids += shard.num_bytes // BYTES_PER_ID
        self._fetch(*(shard.path.relative_to(root).as_posix() for shard in shards))
        return shards

    @property
    def commit(self) -> str | None:
        if not self._pinned and not self.is_local:
            self._fetch(self._indexes)
        return self._pinned or None

    def pin(self, commit: str) -> None:
        self._pinned = commit

    def _fetch(self, *patterns: str) -> Path:
        """The folder with the files of these patterns: the copy, or a snapshot of one commit."""
        if self.copy is not None:
            return Path(self.copy)
        from huggingface_hub import snapshot_download

        remedy = (
            "On a machine with a network run `hf download --repo-type dataset "
            f"{self.repository} --include '*/proc00-*/*' --local-dir prolong`, copy the folder "
            "here and add ?folder=prolong (more proc folders for over 200M tokens)."
        )
        with asking_the_hub(self.repository, remedy):
            folder = snapshot_download(
                self.repository,
                repo_type="dataset",
                revision=self._pinned or None,
                allow_patterns=list(patterns),
            )
        self._pinned = self._pinned or Path(folder).name
        return Path(folder)

    def read(self, start: int) -> Iterator[Document]:
        documents = (ids for shard in self.shards for ids in read_documents(shard))
        return ((ids,) for ids in islice(documents, start, None))


def read_index(path: Path) -> list[Shard]:
    shards = []
    try:
        for entry in json.loads(path.read_bytes())["shards"]:
            file = path_inside(path.parent, entry["raw_data"]["basename"], path, flat=True)
            names, encodings = entry["column_names"], entry["column_encodings"]
            columns = tuple(zip(names, encodings, entry["column_sizes"], strict=True))
            kind = (entry["format"], entry["version"], entry["compression"] or None)
            if kind != ("mds", 2, None):
                raise UserError(f"{file} must be mds version 2 without compression, not {kind}.")
            if IDS not in names or "pkl" in encodings:  # reading a pickle can run any code
                raise UserError(f"{file} must have a column {IDS!r} and no pickle, not {columns}.")
            size, count = int(entry["raw_data"]["bytes"]), int(entry["samples"])
            shards.append(Shard(file, size, count, columns))
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no index of MDS shards ({error!r}); fetch it again.") from error
    return shards


def read_documents(shard: Shard) -> Iterator[NDArray[np.uint32]]:
    """The ids of each document. The file is memory-mapped."""
    path, where = shard.path, ""
    if not path.is_file():
        raise MissingFileError(f"{path} is missing, though {path.parent / INDEX} lists it.")
    try:
        if (size := path.stat().st_size) != shard.num_bytes:
            raise ValueError(f"it has {size:,} bytes, but its {INDEX} says {shard.num_bytes:,}")
        # The table is checked against the file before a sample is cut out by it: a shard whose
        # download broke off has the table, and not all samples.
        data = np.memmap(path, np.uint8, mode="r")
        count = shard.num_samples + 1
        stored, *offsets = np.frombuffer(data, "<u4", 1 + count).tolist()
        ends = [4 + 4 * count, *offsets]
        if stored != shard.num_samples or sorted(ends) != ends or ends[-1] != size:
            raise ValueError(f"its table of samples is not that of {shard.num_samples} samples")
        for number, (begin, end) in enumerate(pairwise(offsets)):
            where = f"sample {number}: "
            yield from cut_sample(data[begin:end], shard)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path} is damaged: {where}{error}. Fetch the file again.") from error


def cut_sample(sample: NDArray[np.uint8], shard: Shard) -> list[NDArray[np.uint32]]:
    """Its documents; without the column of spans the sample is one."""
    #   u32 size, u32 size, ...   bytes of column 1, bytes of column 2, ...
    #   only of columns whose index entry has no size; the bytes follow without gaps
    num_sizes = sum(not fixed for *_, fixed in shard.columns)
    sizes = iter(np.frombuffer(sample, "<u4", num_sizes).tolist())
    values, position = {}, 4 * num_sizes
    for name, encoding, fixed in shard.columns:
        end = position + (fixed or next(sizes))
        if name in (IDS, SPANS):
            values[name] = decode_array(encoding, sample[position:end])
        position = end
    if position != len(sample):
        raise ValueError(f"its columns take {position} bytes, but it has {len(sample)}")
    ids = values[IDS]
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids.size and int(ids.min()) < 0):
        raise ValueError(f"ids are {ids.dtype} of shape {ids.shape}, no list of whole numbers")
    ids = ids.astype(np.uint32)
    if SPANS not in values:
        return [ids]
    spans = values[SPANS].reshape(-1, 2).astype(np.int64)
    # 0, begin, end, begin, end, ..., len: from one to the next it never goes back, and from a begin
    # to its end (every second step) it goes forward.
    steps = np.diff(spans.reshape(-1), prepend=0, append=len(ids))
    if (steps < 0).any() or (steps[1::2] < 1).any():
        raise ValueError(f"its documents do not follow each other within its {len(ids)} ids")
    return [ids[begin:end] for begin, end in spans.tolist()]


def decode_array(encoding: str, data: NDArray[np.uint8]) -> NDArray[Any]:
    """An array from its bytes. The encoding is `ndarray:type:shape`; a type or shape that it leaves
    out is stored before the values."""
    kind, value_type, shape = [*encoding.split(":"), "", ""][:3]
    if kind != "ndarray":
        raise ValueError(f"numbers are encoded as {encoding!r}; only ndarray can be read")
    if not value_type:
        value_type, data = VALUE_TYPES[int(data[0])], data[1:]
    sizes = [int(size) for size in shape.split(",") if size]
    if not sizes:
        # One byte: the number of dimensions, and in its two lowest bits how many bytes (1, 2, 4, 8)
        # each of the sizes after it takes.
        num_dims, width = int(data[0]) >> 2, 1 << (int(data[0]) & 3)
        sizes = data[1 : 1 + num_dims * width].view(f"<u{width}").tolist()
        data = data[1 + num_dims * width :]
    return np.frombuffer(data.tobytes(), np.dtype(value_type).newbyteorder("<")).reshape(sizes)
