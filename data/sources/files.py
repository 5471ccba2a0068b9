"""Text from local files: .txt and .md (a file is a document), .jsonl and .json (a line), .parquet
(a row), plain or compressed with gzip or zstd. A folder is read in the order of its files' paths.

A .txt or .md file of any size is read in blocks. A line or row is in memory whole, and about four
times its size while it is taken apart: a document of gigabytes belongs in a file of its own."""

import codecs
import contextlib
import functools
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bosch.data.sources.source import Document, take_field
from bosch.run.errors import UserError
from bosch.run.fingerprint import hash_file, is_hidden

TEXT, LINES, TABLE = (".txt", ".md"), (".jsonl", ".json"), (".parquet",)
COMPRESSED = (".gz", ".zst")
BLOCK_BYTES = 1 << 20
ROWS_AT_ONCE = 64  # few: a row can be a book


class FileSource:
    """Documents of a file, or of the files below a folder."""

    endless = False

    def __init__(self, path: Path, field: str = "text", tokenizer: str | None = None):
        self.path, self.field, self.tokenizer = path, field, tokenizer
        self.name = str(path)
        self._first_documents: dict[Path, int] = {}  # of each file, once reading came to it

    @functools.cached_property
    def files(self) -> list[Path]:
        found = list_files(self.path)
        for file in found:
            if file.stat().st_size == 0:
                raise UserError(f"{file} is empty; remove it, or fill it.")
        return found

    def facts(self) -> dict[str, Any]:
        files = {self._name_of(file): hash_file(file) for file in self.files}
        return {"source": "files", "field": self.field, "tokenizer": self.tokenizer, "files": files}

    def read(self, start: int) -> Iterator[Document]:
        document = 0
        for file in self.files:
            self._first_documents[file] = document
            kind = kind_of(file)
            if kind in TEXT:
                if document >= start:
                    yield read_text_blocks(file)
                document += 1
                continue
            skip = max(0, start - document)
            unit, read_rows = ("row", read_table) if kind in TABLE else ("line", read_lines)
            number = 0
            for number, row in read_rows(file, skip):
                document += 1
                if row is not None:
                    yield (take_field(row, self.field, f"{file}, {unit} {number}", self.tokenizer),)
            if number == 0:
                raise UserError(f"{file} holds no documents; remove it, or fill it.")

    def files_of(self, documents: int) -> list[str]:
        """The files that hold the first so many documents, which have been read."""
        begun = self._first_documents.items()
        return [self._name_of(file) for file, first in begun if first < documents]

    def _name_of(self, file: Path) -> str:
        root = self.path if self.path.is_dir() else self.path.parent
        return file.relative_to(root).as_posix()


def list_files(path: Path) -> list[Path]:
    packed = " or ".join(COMPRESSED)
    kinds = f"{' '.join(TEXT + LINES + TABLE)}, and but for the last with {packed} behind"
    if path.is_file():
        if kind_of(path) is None:
            raise UserError(f"{path} is none of the kinds of file that hold text: {kinds}.")
        return [path]
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and kind_of(file) is not None and not is_hidden(file, path)
    ]
    if not files:
        raise UserError(f"{path} holds no file of text; it is read from {kinds}.")
    return files


def kind_of(path: Path) -> str | None:
    """The suffix that says what is inside, or None."""
    *_, before, last = ["", "", *path.suffixes]
    if last in COMPRESSED:
        return before if before in TEXT + LINES else None
    return last if last in TEXT + LINES + TABLE else None


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked. A damaged archive is a UserError that names it."""
    try:
        with unpack(path) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        if path.suffix not in COMPRESSED:
            raise
        raise UserError(
            f"{path} is damaged, or not what its suffix says ({error}); fetch it again."
        ) from error


def unpack(path: Path) -> Any:
    if path.suffix == ".zst":
        # pyarrow comes with `datasets` and knows zstd, which Python's library does not yet.
        import pyarrow

        stream = pyarrow.input_stream(str(path), compression="zstd")
        return io.BufferedReader(stream, BLOCK_BYTES)
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def read_text_blocks(path: Path) -> Iterator[str]:
    """A text in blocks: a file of any size is never in memory whole."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with open_bytes(path) as file:
        while True:
            chunk = file.read(BLOCK_BYTES)
            waiting = len(decoder.getstate()[0])  # bytes of a character begun in the block before
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise not_utf8(path, f"byte {done - waiting + error.start:,}") from error
            yield text.removeprefix("\ufeff") if done == 0 else text
            done += len(chunk)
            if not chunk:
                return


def read_lines(path: Path, skip: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(line number, object) of a file with an object a line. The first `skip` are None, unread."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if skip > 0:
                skip -= 1
                yield number, None
                continue
            try:
                row = json.loads(line)
            except UnicodeDecodeError as error:
                raise not_utf8(path, f"line {number}") from error
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}, line {number} is not JSON ({error}); each line is one object."
                ) from error
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise UserError(f"{path}, line {number} is a {kind}; each line is one object.")
            yield number, row


def read_table(path: Path, skip: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(row number, row) of a parquet file. The first `skip` are None, whole row groups unread."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as table:
            for group in range(table.num_row_groups):
                num_rows = table.metadata.row_group(group).num_rows
                if skip >= num_rows:
                    for skipped in range(1, num_rows + 1):
                        yield number + skipped, None
                    number += num_rows
                    skip -= num_rows
                    continue
                batches = table.iter_batches(ROWS_AT_ONCE, row_groups=[group], use_threads=False)
                for batch in batches:
                    for row in batch.to_pylist():
                        number += 1
                        skip -= 1
                        yield number, None if skip >= 0 else row
    except UnicodeDecodeError as error:
        raise not_utf8(path, f"row {number + 1} or one of the next {ROWS_AT_ONCE - 1}") from error
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is damaged, or no parquet file ({error}); fetch it again."
        ) from error


def not_utf8(path: Path, where: str) -> UserError:
    return UserError(
        f"{path}: {where} is not UTF-8 text. Convert the file (iconv -f LATIN1 -t UTF-8, if that "
        "is what it is), or leave it out."
    )
