"""The files of packed tokens, and how they grow so that a killed packing can resume.

    tokens.bin     training tokens, one document after another; sequence i is
                   [i * seq_len:][:seq_len]
    doc_ends.npy   where in them each document ends (u64)
    held_out.bin, held_out_doc_ends.npy
                   the same for the held-out slice, used only for the validation loss
    order.npy      [epoch, n]: the sequences in training order
    tokens.json    the summary: tokenizer hash, length, sources, counts, what was dropped

Tokens are appended as they come. After every shard of work the files are forced to disk, and
`.packing.json` records their sizes and checksums. Hidden files are no results, so they stay."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bosch.run.files import DamagedArtifactError, open_own_file, write_atomically

TOKENS, HELD_OUT = "tokens.bin", "held_out.bin"
DOC_ENDS, HELD_OUT_DOC_ENDS = "doc_ends.npy", "held_out_doc_ends.npy"
ORDER, SUMMARY, PROGRESS = "order.npy", "tokens.json", ".packing.json"
# In the order of `done`. The ends become .npy files once their number is known.
GROWING = (TOKENS, HELD_OUT, ".doc_ends.u64", ".held_out_doc_ends.u64")

MAKE_AGAIN = "Pack the tokens again (`bosch recover` --fresh tokens; or remove the folder)."


class GrowingFiles:
    """Appends to the files, starting where the last complete shard ended: `done` holds the size and
    checksum of each file there, and is empty before the first."""

    def __init__(self, folder: Path, token_bytes: int, done: Sequence[tuple[int, str]]):
        self.folder, self.token_bytes = folder, token_bytes
        self.sizes = [size for size, _ in done] or [0] * len(GROWING)
        self._digests = [self._hash_start(number) for number in range(len(GROWING))]
        # What a killed packing has left is taken over only if it is what the record says: tokens
        # appended to a damaged file would look whole.
        for number, (size, checksum) in enumerate(done):
            if self._digests[number].hexdigest() != checksum:
                raise DamagedArtifactError(
                    f"{folder / GROWING[number]} is damaged or missing: the checksum of its first "
                    f"{size:,} bytes differs from {PROGRESS}. {MAKE_AGAIN}"
                )
        self._files = [open_own_file(folder / name, "a+b") for name in GROWING]
        self.truncate()  # what a killed packing has written behind its last complete shard

    def close(self) -> None:
        for file in self._files:
            file.close()

    def append(self, name: str, ids: NDArray[np.integer], ends: NDArray[np.int64]) -> None:
        """Append tokens, and where among them documents end."""
        number = GROWING.index(name)
        ends = (ends + self.sizes[number] // self.token_bytes).astype("<u8")
        for place, array in ((number, ids), (number + 2, ends)):
            # As bytes without a copy, which both the file and the checksum take.
            data = np.ascontiguousarray(array).view(np.uint8).data
            self._files[place].write(data)
            self._digests[place].update(data)  # as it grows: the whole file is never read again
            self.sizes[place] += len(data)

    def end_shard(self) -> list[tuple[int, str]]:
        """Force all files to disk. Returns `done`, which the caller saves."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        digests = (digest.hexdigest() for digest in self._digests)
        return list(zip(self.sizes, digests, strict=True))

    def cut_tokens(self, num_tokens: int) -> None:
        """Leave the tokens behind these out: of the next shard, and after `truncate` of the disk.
        A kill in between changes nothing, because a resumed packing truncates too."""
        # Before the file is read for its digest; what stays in a buffer is not there.
        self._files[0].flush()
        self.sizes[0] = num_tokens * self.token_bytes
        self._digests[0] = self._hash_start(0)

    def truncate(self) -> None:
        for file, size in zip(self._files, self.sizes, strict=True):
            file.truncate(size)

    def write_ends(self, name: str, path: str, parts: Sequence[int]) -> None:
        """Write where documents end: with each part of the tokens one does too."""
        found = np.fromfile(self.folder / GROWING[GROWING.index(name) + 2], "<u8")
        # `found` may go beyond the last part: tokens of the tail were cut off after they came.
        borders = np.cumsum(parts, dtype="<u8")
        ends = np.union1d(found, borders)
        write_array(self.folder / path, ends[(ends > 0) & (ends <= borders[-1])])

    def _hash_start(self, number: int) -> Any:
        """The digest of a file's bytes up to its size, to which more can be added."""
        path, size = self.folder / GROWING[number], self.sizes[number]
        # Memory-mapped, since it may be larger than memory; an empty file cannot be.
        is_there = size and path.is_file() and path.stat().st_size >= size
        content: Any = np.memmap(path, np.uint8, "r", shape=size) if is_there else b""
        return xxhash.xxh3_128(content)


def write_array(path: Path, array: NDArray[np.integer]) -> None:
    """Forced to disk, before the summary says that it is complete."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_atomically(path, buffer.getvalue())


def read_array(path: Path) -> NDArray[Any]:
    try:
        return np.load(path, allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError) as error:
        raise DamagedArtifactError(
            f"{path} is damaged or missing ({error}). {MAKE_AGAIN}"
        ) from error
