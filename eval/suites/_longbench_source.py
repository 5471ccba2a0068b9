"""LongBench's rows: from data.zip, from a folder of JSONL or Parquet files, or from the hub.

The library datasets no longer runs the hub's loading script, so data.zip is downloaded and read
with zipfile. The number of rows of each data set is checked, and its bytes get a sha256.
"""

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bosch.eval.rows import Row, find_one, from_hub, parse_rows, require, require_count, the_only
from bosch.run.errors import UserError
from bosch.run.files import path_inside

# Of data.zip as the hub has had it since 2023-08 (its Git LFS page says so).
PUBLISHED_ZIP_SHA256 = "cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64"

LARGEST_MEMBER = 1 << 31  # bytes; the largest published data set has 13 MB


@dataclass(frozen=True)
class DatasetRows:
    rows: list[Row]
    path: str  # of the file; in a zip followed by the member
    sha256: str  # of the bytes of this data set


def read_dataset(source: str, name: str, num_rows: int) -> DatasetRows:
    """The rows of one data set (`hotpotqa`, `hotpotqa_e`), each with LongBench's fields."""
    path = locate(source)
    if path.is_file():
        content, where = read_member(path, name)
    else:
        file = find_one(path, "data", name, ("{0}.parquet", "{0}/*.jsonl", "{0}/*.parquet"))
        content, where = file.read_bytes(), str(file)
    rows = parse_rows(content, where)
    for number, row in enumerate(rows, 1):
        check_row(row, f"{where}, row {number}")
    require_count(rows, num_rows, f"LongBench's {name}", where)
    return DatasetRows(rows, where, hashlib.sha256(content).hexdigest())


def describe_source(source: str) -> str:
    """A log line: what is read, and whether it is the published file."""
    path = locate(source)
    if path.is_dir():
        return f"LongBench from the folder {path}"
    sha256 = hash_zip(path)
    version = "the published file" if sha256 == PUBLISHED_ZIP_SHA256 else "not the published file"
    return f"LongBench from {path}: {version}, sha256 {sha256}"


@lru_cache(maxsize=1)
def hash_zip(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def locate(source: str) -> Path:
    """The zip file or folder of a source. A hub id's data.zip is downloaded."""
    path = Path(source)
    if path.is_dir() and not (path / "data.zip").is_file():
        return path
    if path.is_dir():
        path /= "data.zip"
    if path.is_file():
        if not zipfile.is_zipfile(path):
            raise UserError(f"{path} is not a zip file; name LongBench's data.zip or a folder.")
        return path
    forms = "its data.zip, a folder of .jsonl or .parquet files, zai-org/LongBench, or toy"
    with from_hub(source, "LongBench", forms):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(source, "data.zip", repo_type="dataset"))


def read_member(path: Path, name: str) -> tuple[bytes, str]:
    """A data set's bytes from data.zip, from any folder in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            files = [member for member in archive.namelist() if not member.startswith("__MACOSX")]
            members = [member for member in files if member.rsplit("/", 1)[-1] == f"{name}.jsonl"]
            member = the_only(members, name, path)
            where = path_inside(path, member, path)
            if (size := archive.getinfo(member).file_size) > LARGEST_MEMBER:
                raise UserError(
                    f"{where} would take {size:,} bytes, far more than a data set of LongBench; "
                    "download the file again."
                )
            return archive.read(member), str(where)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} is damaged ({error}). Download it again.") from error


def check_row(row: Row, where: str) -> None:
    if "input" not in row and "question" in row:
        raise UserError(
            f"{where} has a field `question` and no `input`: this copy (Xnhyacinth/LongBench) is "
            "for other prompts. Use the original data.zip of zai-org/LongBench."
        )
    require(row, where, str, "input", "context")
    require(row, where, list, "answers")
    require(row, where, int, "length")
