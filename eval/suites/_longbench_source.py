"""LongBench's rows: from data.zip, from a folder of JSONL or Parquet files, or from the hub.

The hub's own loading script is no longer run by the library datasets, so data.zip is fetched and
read with zipfile. Every data set's number of rows is checked, and what was read has a sha256.
"""

import hashlib
import re
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from eval.rows import Row, parse_parquet, parse_rows, require_text, require_texts

# Of data.zip as the hub has had it since 2023-08 (its Git LFS page says so).
PUBLISHED_ZIP_SHA256 = "cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class DatasetRows:
    rows: list[Row]
    path: str  # of the file, or of the zip and the member in it
    sha256: str  # of the bytes of this data set


def read_dataset(source: str, name: str, num_rows: int) -> DatasetRows:
    """The rows of one data set (`hotpotqa`, `hotpotqa_e`), each with LongBench's fields."""
    path = locate(source)
    content, where = read_member(path, name) if path.is_file() else read_file(path, name)
    if where.endswith(".parquet"):
        rows = parse_parquet(content, where)
    else:
        rows = parse_rows(content, where, gzipped=where.endswith(".gz"))
    for number, row in enumerate(rows, 1):
        check_row(row, f"{where}, row {number}")
    if len(rows) != num_rows:
        raise ValueError(
            f"{where} has {len(rows)} rows, but LongBench's {name} has {num_rows}; "
            "get the whole set (--limit takes its first rows)."
        )
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
            raise ValueError(f"{path} is not a zip file; name LongBench's data.zip, or a folder.")
        return path
    if not HUB_ID.fullmatch(source):
        raise FileNotFoundError(
            f"{source}: no LongBench there. Name its data.zip, a folder with <data set>.jsonl or "
            ".parquet files, a hub id such as zai-org/LongBench, or toy."
        )
    return download_zip(source)


def download_zip(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub_id, "data.zip", repo_type="dataset"))
    except Exception as error:  # whatever a hub, a cache or a network can answer
        raise FileNotFoundError(
            f"{hub_id}: no such file or folder, and no data.zip from the hub either "
            f"({type(error).__name__}). Download data.zip and name its path."
        ) from error


def read_member(path: Path, name: str) -> tuple[bytes, str]:
    """A data set's bytes out of data.zip, whatever folder of the zip it lies in."""
    with zipfile.ZipFile(path) as archive:
        members = [
            member
            for member in archive.namelist()
            if member.rsplit("/", 1)[-1] == f"{name}.jsonl" and not member.startswith("__MACOSX")
        ]
        member = the_only(members, name, str(path))
        try:
            return archive.read(member), f"{path}/{member}"
        except (zipfile.BadZipFile, OSError) as error:
            raise ValueError(f"{path}: the member {member} is damaged ({error}).") from error


def read_file(folder: Path, name: str) -> tuple[bytes, str]:
    patterns = (
        f"{name}.jsonl",
        f"{name}.jsonl.gz",
        f"{name}.parquet",
        f"{name}/*.jsonl",
        f"{name}/*.parquet",
    )
    files = [
        str(file)
        for place in (folder, folder / "data")
        for pattern in patterns
        for file in sorted(place.glob(pattern))
    ]
    path = the_only(files, name, str(folder))
    return Path(path).read_bytes(), path


def the_only(found: list[str], name: str, place: str) -> str:
    if not found:
        raise FileNotFoundError(
            f"{place} holds no {name}: a file {name}.jsonl, .jsonl.gz or .parquet was looked for."
        )
    if len(found) > 1:
        raise ValueError(f"{place} holds {name} more than once: {', '.join(found)}. Keep one.")
    return found[0]


def check_row(row: Row, where: str) -> None:
    if "input" not in row and "question" in row:
        raise ValueError(
            f"{where} has a field `question` and no `input`: this is a copy made for other "
            "prompts (Xnhyacinth/LongBench). Use the original data.zip of zai-org/LongBench."
        )
    for field in ("input", "context"):
        require_text(row, field, where)
    require_texts(row, "answers", where)
    if not isinstance(row.get("length"), int):
        raise ValueError(f"{where}: the field `length` must be a whole number.")
