"""LongBench's rows: from data.zip, from a folder of JSONL or Parquet files, or from the hub.

The hub's own loading script is no longer run by the library datasets, so data.zip is fetched and
read with zipfile. Every data set's number of rows is checked, and what was read has a sha256.
"""

import hashlib
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bosch.eval.rows import (
    Row,
    find_one,
    from_hub,
    parse_rows,
    require_count,
    require_text,
    require_texts,
    the_only,
)
from bosch.run.errors import UserError

# Of data.zip as the hub has had it since 2023-08 (its Git LFS page says so).
PUBLISHED_ZIP_SHA256 = "cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64"


@dataclass(frozen=True)
class DatasetRows:
    rows: list[Row]
    path: str  # of the file, or of the zip and the member in it
    sha256: str  # of the bytes of this data set


def read_dataset(source: str, name: str, num_rows: int) -> DatasetRows:
    """The rows of one data set (`hotpotqa`, `hotpotqa_e`), each with LongBench's fields."""
    path = locate(source)
    if path.is_file():
        content, where = read_member(path, name)
    else:
        found = find_one(path, "data", name, ("{0}.parquet", "{0}/*.jsonl", "{0}/*.parquet"))
        content, where = found.read_bytes(), str(found)
    rows = parse_rows(content, where)
    for number, row in enumerate(rows, 1):
        check_row(row, f"{where}, row {number}")
    require_count(rows, num_rows, f"LongBench's {name}", where)
    return DatasetRows(rows, where, hashlib.sha256(content).hexdigest())


def describe_source(source: str) -> str:
    """One line for the log: what is read, and whether it is the published file."""
    path = locate(source)
    if path.is_dir():
        return f"LongBench from the folder {path}"
    sha256 = hash_zip(path)
    told = "the published file" if sha256 == PUBLISHED_ZIP_SHA256 else "not the published file"
    return f"LongBench from {path}: {told}, sha256 {sha256}"


@lru_cache(maxsize=1)
def hash_zip(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def locate(source: str) -> Path:
    """The zip file or the folder behind a source; a hub id's data.zip is fetched."""
    path = Path(source)
    if path.is_dir():
        return path / "data.zip" if (path / "data.zip").is_file() else path
    if path.is_file():
        if not zipfile.is_zipfile(path):
            raise UserError(f"{path} is not a zip file; name LongBench's data.zip, or a folder.")
        return path
    forms = "its data.zip, a folder of .jsonl or .parquet files, zai-org/LongBench, or toy"
    with from_hub(source, "LongBench", forms):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(source, "data.zip", repo_type="dataset"))


def read_member(path: Path, name: str) -> tuple[bytes, str]:
    """A data set's bytes out of data.zip, whatever folder of the zip it lies in."""
    with zipfile.ZipFile(path) as archive:
        files = [member for member in archive.namelist() if not member.startswith("__MACOSX")]
        members = [member for member in files if member.rsplit("/", 1)[-1] == f"{name}.jsonl"]
        member = the_only(members, name, path)
        try:
            return archive.read(member), f"{path}/{member}"
        except (zipfile.BadZipFile, OSError) as error:
            raise UserError(f"{path}: the member {member} is damaged ({error}).") from error


def check_row(row: Row, where: str) -> None:
    if "input" not in row and "question" in row:
        raise UserError(
            f"{where} has a field `question` and no `input`: this is a copy made for other "
            "prompts (Xnhyacinth/LongBench). Use the original data.zip of zai-org/LongBench."
        )
    for field in ("input", "context"):
        require_text(row, field, where)
    require_texts(row, "answers", where)
    if not isinstance(row.get("length"), int):
        raise UserError(f"{where}: the field `length` must be a whole number.")
