"""Text from local files. A document is a whole .txt or .md file, which is read in blocks, a line of
a .jsonl or .json file, or a row of a .parquet file. All but parquet may be compressed with gzip or
zstd. The files of a folder are read in the order of their paths.

The builders of `datasets` are not used here: they read a text file whole, change its line ends, and
take a string that looks like a date for one."""

import codecs
import contextlib
import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bosch.data.sources.source import TEXT_FIELD, Document, Source, first_line, take_field
from bosch.run.errors import UserError
from bosch.run.fingerprint import hash_file, visible_files
from bosch.run.progress import say

TEXT, LINES, TABLE = (".txt", ".md"), (".jsonl", ".json"), (".parquet",)
COMPRESSED = (".gz", ".zst")
KINDS = f"{' '.join(TEXT + LINES + TABLE)} (all but {TABLE[0]} also {' or '.join(COMPRESSED)})"
BLOCK_BYTES = 1 << 20
ROWS_AT_ONCE = 64  # few: a row can be a book

Row = dict[str, object]


class FileSource(Source):
    """Documents of a file, or of the files below a folder."""

    def __init__(self, path: Path, field: str = TEXT_FIELD, tokenizer: str | None = None):
        self.path, self.field, self.tokenizer = path, field, tokenizer
        self.name = str(path)
        self.first_documents: dict[Path, int] = {}  # numbers, of the files that have been read

    @functools.cached_property
    def files(self) -> list[Path]:
        files = [self.path] if self.path.is_file() else visible_files(self.path)
        # Linked folders are not entered, as they may lead back here.
        if self.path.is_dir() and (links := [p for p in self.path.rglob("*") if is_linked(p)]):
            say(f"{self.path}: linked folders are left out ({links[0]}); name them as sources too")
        if not (files := [file for file in files if kind_of(file)]):
            raise UserError(f"{self.path} is or holds no file that text is read from: {KINDS}.")
        for file in files:
            if file.stat().st_size == 0:
                raise UserError(f"{file} is empty; remove it, or fill it.")
        return files

    def facts(self) -> dict[str, object]:
        root = self.path if self.path.is_dir() else self.path.parent
        files = {file.relative_to(root).as_posix(): hash_file(file) for file in self.files}
        return {"source": "files", "field": self.field, "tokenizer": self.tokenizer, "files": files}

    def read(self, start: int) -> Iterator[Document]:
        # Documents are numbered over all files; files before `start` are read too, as only its end
        # says how many a file holds.
        number = 0
        for file in self.files:
            first = self.first_documents[file] = number
            if kind_of(file) in TEXT:
                if number >= start:
                    yield read_text_blocks(file)
                number += 1
                continue
            for number, (place, row) in enumerate(rows_of(file), start=first + 1):
                if number > start:
                    yield (take_field(row, self.field, f"{file}, {place}", self.tokenizer),)
            if number == first:
                raise UserError(f"{file} holds no documents; remove it, or fill it.")


def is_linked(path: Path) -> bool:
    return path.is_symlink() and path.is_dir()


def kind_of(path: Path) -> str | None:
    """The suffix that says what is inside, or None."""
    # Of `a.jsonl.gz` both; two empty ones, so that a name without suffixes has two as well.
    *_, before, last = ["", "", *path.suffixes]
    before, last = before.lower(), last.lower()
    if last in COMPRESSED:
        return before if before in TEXT + LINES else None
    return last if last in TEXT + LINES + TABLE else None


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[Any]:
    """A file's bytes, decompressed. A damaged file is a UserError that names it."""
    if path.suffix.lower() not in COMPRESSED:
        with path.open("rb") as file:
            yield file
        return
    import pyarrow  # comes with `datasets`

    try:
        kind = "gzip" if path.suffix.lower() == ".gz" else "zstd"
        stream = pyarrow.input_stream(str(path), compression=kind)
        with io.BufferedReader(stream, BLOCK_BYTES) as file:
            yield file
    except OSError as error:
        if error.errno is not None:  # the machine's own refusals have a number
            raise
        raise UserError(f"{path} is damaged, or not what its suffix says ({error}).") from error


def read_text_blocks(path: Path) -> Iterator[str]:
    """A text in blocks, so that a file of any size fits in memory."""
    # Incremental, as a character of several bytes may lie across two blocks; "sig" drops the byte
    # order mark of files from Windows. Not text mode, which would change line ends.
    decoder, done = codecs.getincrementaldecoder("utf-8-sig")(), 0
    with open_bytes(path) as file:
        while True:
            chunk = file.read(BLOCK_BYTES)
            done += len(chunk)
            try:
                yield decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                position = done - len(error.object) + error.start
                raise not_utf8(path, f"byte {position:,}") from error
            if not chunk:
                return


def rows_of(path: Path) -> Iterator[tuple[str, Row]]:
    """(place, row) of a parquet file, or of one with a JSON object per line."""
    if path.suffix.lower() in TABLE:
        yield from read_table(path)
        return
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                row = json.loads(line)
            except UnicodeDecodeError as error:
                raise not_utf8(path, place) from error
            except (ValueError, RecursionError) as error:  # also numbers and nesting beyond Python
                raise UserError(f"{path}, {place} is not JSON: {error}.") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}, {place} is no JSON object, which it must be.")
            yield place, row


def read_table(path: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        # One batch after another, without threads that read ahead: a row can be a book.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as table:
            batches = table.iter_batches(ROWS_AT_ONCE, use_threads=False)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"row {number}", row
    except UnicodeDecodeError as error:
        raise not_utf8(path, f"row {number + 1} or one of the next {ROWS_AT_ONCE - 1}") from error
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is no whole parquet file ({first_line(error)}).") from error


def not_utf8(path: Path, where: str) -> UserError:
    return UserError(f"{path}: {where} is not UTF-8 text. Convert the file (iconv -t UTF-8).")
