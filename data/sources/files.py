"""Text from local files. A document is a whole .txt or .md file, which is read in blocks, a line of
a .jsonl or .json file, or a row of a .parquet file. All but parquet may be compressed with gzip or
zstd. The files of a folder are read in the order of their paths.

The builders of `datasets` are not used here: they read a text file whole, change its line ends, and
take a string that looks like a date for one."""

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

from bosch.data.sources.source import Document, first_line, take_field
from bosch.run.errors import UserError
from bosch.run.fingerprint import hash_file, visible_files

TEXT, LINES, TABLE = (".txt", ".md"), (".jsonl", ".json"), (".parquet",)
COMPRESSED = (".gz", ".zst")
KINDS = f"{' '.join(TEXT + LINES + TABLE)} (all but {TABLE[0]} also {' or '.join(COMPRESSED)})"
BLOCK_BYTES = 1 << 20
ROWS_AT_ONCE = 64  # few: a row can be a book

Row = dict[str, object] | None  # None: skipped, so not parsed


class FileSource:
    """Documents of a file, or of the files below a folder."""

    endless = False

    def __init__(self, path: Path, field: str = "text", tokenizer: str | None = None):
        self.path, self.field, self.tokenizer = path, field, tokenizer
        self.name = str(path)
        self._first_documents: dict[Path, int] = {}  # number of each file's first, once it is read

    @functools.cached_property
    def files(self) -> list[Path]:
        if self.path.is_file():
            files = [self.path] if kind_of(self.path) else []
        else:
            files = [file for file in visible_files(self.path) if kind_of(file)]
        if not files:
            raise UserError(f"{self.path} is or holds no file that text is read from: {KINDS}.")
        for file in files:
            if file.stat().st_size == 0:
                raise UserError(f"{file} is empty; remove it, or fill it.")
        return files

    def facts(self) -> dict[str, object]:
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
            unit, read_rows = ("row", read_table) if kind in TABLE else ("line", read_lines)
            before = document
            for number, row in read_rows(file, max(0, start - before)):
                document += 1
                if row is not None:
                    yield (take_field(row, self.field, f"{file}, {unit} {number}", self.tokenizer),)
            if document == before:
                raise UserError(f"{file} holds no documents; remove it, or fill it.")

    def files_of(self, documents: int) -> list[str]:
        """The files that hold the first `documents` documents, which have been read."""
        firsts = self._first_documents.items()
        return [self._name_of(file) for file, first in firsts if first < documents]

    def _name_of(self, file: Path) -> str:
        root = self.path if self.path.is_dir() else self.path.parent
        return file.relative_to(root).as_posix()


def kind_of(path: Path) -> str | None:
    """The suffix that says what is inside, or None."""
    *_, before, last = ["", "", *path.suffixes]
    if last in COMPRESSED:
        return before if before in TEXT + LINES else None
    return last if last in TEXT + LINES + TABLE else None


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed. A damaged file is a UserError that names it."""
    try:
        openers: dict[str, Any] = {".gz": gzip.open, ".zst": open_zstd}
        opener = openers.get(path.suffix, type(path).open)  # a path may be of a zip's member
        with opener(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        # The machine's own refusals have a number; the errors of gzip and zstd do not.
        if path.suffix not in COMPRESSED or getattr(error, "errno", None) is not None:
            raise
        raise UserError(f"{path} is damaged, or not what its suffix says ({error}).") from error


def open_zstd(path: Path, mode: str) -> Any:
    import pyarrow  # comes with `datasets`; Python's library does not read zstd yet

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), BLOCK_BYTES)


def read_text_blocks(path: Path) -> Iterator[str]:
    """A text in blocks, so that a file of any size fits in memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with open_bytes(path) as file:
        while True:
            chunk = file.read(BLOCK_BYTES)
            waiting = len(decoder.getstate()[0])  # bytes of a character that the last block began
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise not_utf8(path, f"byte {done - waiting + error.start:,}") from error
            yield text.removeprefix("\ufeff") if done == 0 else text
            done += len(chunk)
            if not chunk:
                return


def read_lines(path: Path, skip: int = 0) -> Iterator[tuple[int, Row]]:
    """(line number, object) of a file with one object per line; the first `skip` are skipped."""
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
            except (ValueError, RecursionError) as error:  # also numbers and nesting beyond Python
                raise UserError(f"{path}, line {number} is not JSON: {error}.") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number} is no JSON object, which it must be.")
            yield number, row


def read_table(path: Path, skip: int) -> Iterator[tuple[int, Row]]:
    """(row number, row) of a parquet file; the first `skip` are skipped, whole groups unread."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as table:
            for group in range(table.num_row_groups):
                num_rows = table.metadata.row_group(group).num_rows
                if number + num_rows <= skip:
                    yield from ((number + i, None) for i in range(1, num_rows + 1))
                    number += num_rows
                    continue
                batches = table.iter_batches(ROWS_AT_ONCE, row_groups=[group], use_threads=False)
                for row in (row for batch in batches for row in batch.to_pylist()):
                    number += 1
                    yield number, row if number > skip else None
    except UnicodeDecodeError as error:
        raise not_utf8(path, f"row {number + 1} or one of the next {ROWS_AT_ONCE - 1}") from error
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is no whole parquet file ({first_line(error)}).") from error


def not_utf8(path: Path, where: str) -> UserError:
    return UserError(f"{path}: {where} is not UTF-8 text. Convert the file (iconv -t UTF-8).")
