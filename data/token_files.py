"""The files of packed tokens, and how they grow so that a killed packing can resume.

    tokens.bin     training tokens, one document after another; sequence i is
                   [i * seq_len:][:seq_len]
    doc_ends.npy   where in them each document ends (u64)
    held_out.bin, held_out_doc_ends.npy
                   the same for the held-out slice, used only for the validation loss
    order.npy      [epoch, n]: the sequences in training order
    tokens.json    the summary: tokenizer hash, length, sources, counts, what was dropped

Tokens are appended as they come. After every shard of work the files are forced to disk, and
`.progress.json` records their sizes and checksums."""

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bosch.run.files import DamagedArtifactError, open_own_file, read_sealed_json, write_atomically
from bosch.run.fingerprint import hash_file

TOKENS, HELD_OUT = "tokens.bin", "held_out.bin"
DOC_ENDS, HELD_OUT_DOC_ENDS = "doc_ends.npy", "held_out_doc_ends.npy"
ORDER, SUMMARY, PROGRESS = "order.npy", "tokens.json", ".progress.json"
# In the order of GrowingFiles.files. The ends become .npy files once their number is known.
GROWING = (TOKENS, HELD_OUT, ".doc_ends.u64", ".held_out_doc_ends.u64")

CHUNK_BYTES = 1 << 22
MAKE_AGAIN = "Pack the tokens again (recover.py --fresh tokens; or remove the folder)."


class GrowingFiles(contextlib.AbstractContextManager["GrowingFiles"]):
    """Appends to the files, starting where the last complete shard ended: `done` holds the size and
    checksum of each file there, and is empty before the first."""

    def __init__(self, folder: Path, token_bytes: int, done: Sequence[tuple[int, str]]):
        self.folder, self.token_bytes, self.done = folder, token_bytes, list(done)
        self.sizes = [size for size, _ in done] or [0] * len(GROWING)
        self._digests = [xxhash.xxh3_128() for _ in GROWING]
        self.files: list[IO[bytes]] = []
        for number, name in enumerate(GROWING):
            path, size = folder / name, self.sizes[number]
            if done:  # what is on disk is checked before more is appended to it
                if not path.is_file():
                    raise DamagedArtifactError(
                        f"{path} is missing, though {PROGRESS} lists it. {MAKE_AGAIN}"
                    )
                self._digests[number] = hash_start(path, size)
                if self._digests[number].hexdigest() != done[number][1]:
                    raise DamagedArtifactError(
                        f"{path} is damaged in its first {size:,} bytes: its checksum differs from "
                        f"{PROGRESS}. {MAKE_AGAIN}"
                    )
            self.files.append(open_own_file(path, "a+b"))
            self.files[-1].truncate(size)

    def __exit__(self, *error: object) -> None:
        for file in self.files:
            file.close()
        if not self.done:
            for name in GROWING:
                (self.folder / name).unlink(missing_ok=True)

    def num_tokens(self, name: str) -> int:
        return self.sizes[GROWING.index(name)] // self.token_bytes

    def append(self, name: str, ids: NDArray[np.integer], ends: NDArray[np.int64]) -> None:
        """Append tokens, and where among them documents end."""
        ends = ends + self.num_tokens(name)
        self._write(GROWING.index(name), ids)
        self._write(GROWING.index(name) + 2, ends.astype("<u8"))

    def end_document(self, name: str) -> None:
        """End a document with the last token written, unless one ends there already."""
        number, count = GROWING.index(name) + 2, self.num_tokens(name)
        file = self.files[number]
        file.seek(max(0, self.sizes[number] - 8))
        if count and int.from_bytes(file.read(8), "little") != count:
            self._write(number, np.array([count], "<u8"))

    def end_shard(self) -> None:
        """Force all files to disk and note the shard in `done`, which the caller saves."""
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
        digests = (digest.hexdigest() for digest in self._digests)
        self.done = list(zip(self.sizes, digests, strict=True))

    def write_ends(self, name: str, path: str, num_tokens: int) -> None:
        """Write the document ends up to a number of tokens; the last document ends there."""
        ends = np.fromfile(self.folder / GROWING[GROWING.index(name) + 2], "<u8")
        ends = ends[ends < num_tokens]
        last = np.array([num_tokens] if num_tokens else [], "<u8")
        write_array(self.folder / path, np.append(ends, last))

    def _write(self, number: int, array: NDArray[np.integer]) -> None:
        data = np.ascontiguousarray(array).view(np.uint8).data
        self.files[number].write(data)
        self._digests[number].update(data)
        self.sizes[number] += len(data)


def hash_start(path: Path, size: int) -> Any:
    """The digest of a file's first bytes, to which more can be added."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while size > 0 and (chunk := file.read(min(size, CHUNK_BYTES))):
            digest.update(chunk)
            size -= len(chunk)
    return digest


def write_array(path: Path, array: NDArray[np.integer]) -> None:
    """Forced to disk, before the summary says that it is complete."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    write_atomically(path, buffer.getvalue())


def read_array(path: Path) -> NDArray[Any]:
    """What write_array wrote."""
    if not path.is_file():
        raise DamagedArtifactError(f"{path} is missing. {MAKE_AGAIN}")
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DamagedArtifactError(f"{path} is damaged ({error}). {MAKE_AGAIN}") from error


def check_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        state = "is missing" if found is None else f"has {found:,} bytes"
        raise DamagedArtifactError(f"{path} {state}, but {SUMMARY} says {size:,}. {MAKE_AGAIN}")


def hash_complete(folder: Path, size: int) -> dict[str, str]:
    """Checksums of the files as they are once the tokens are cut to `size` bytes."""
    names = (DOC_ENDS, HELD_OUT, HELD_OUT_DOC_ENDS, ORDER)
    checksums = {name: hash_file(folder / name) for name in names if (folder / name).is_file()}
    return checksums | {TOKENS: hash_start(folder / TOKENS, size).hexdigest()}


def check_complete(folder: Path) -> None:
    """Before the folder has its manifest: check what a killed packing left complete."""
    cut_tail(folder)
    found = hash_complete(folder, (folder / TOKENS).stat().st_size)
    for name, checksum in read_sealed_json(folder / SUMMARY, "checksums")["checksums"].items():
        if found.get(name) != checksum:
            raise DamagedArtifactError(
                f"{folder / name} is damaged: its checksum differs from {SUMMARY}. {MAKE_AGAIN}"
            )


def cut_tail(folder: Path) -> None:
    """The last step, after the progress file, whose checksums cover the tail, is removed."""
    summary = read_sealed_json(folder / SUMMARY)
    size = summary["num_sequences"] * summary["seq_len"] * summary["token_bytes"]
    if (folder / TOKENS).is_file() and (folder / TOKENS).stat().st_size > size:
        with open_own_file(folder / TOKENS, "r+b") as file:
            file.truncate(size)
    check_size(folder / TOKENS, size)
    for name in GROWING[2:]:
        (folder / name).unlink(missing_ok=True)
