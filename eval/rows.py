"""Files of rows (JSONL, one object a line) as the suites' commands read and write them."""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bosch.run.manifest import write_atomically

Row = dict[str, Any]
SURROGATES = re.compile("[\ud800-\udfff]")


def read_rows(path: Path) -> list[Row]:
    """The rows of a .jsonl or .jsonl.gz file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; name a JSONL file, one object a line.")
    return parse_rows(path.read_bytes(), str(path), gzipped=path.suffix == ".gz")


def parse_rows(content: bytes, name: str, gzipped: bool = False) -> list[Row]:
    """The rows in the bytes of a JSONL file. Only line feeds end a line."""
    try:
        text = (gzip.decompress(content) if gzipped else content).decode("utf-8-sig")
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        kind = "gzipped UTF-8" if gzipped else "UTF-8"
        raise ValueError(f"{name}: rows must be {kind} text ({error}).") from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}, line {number}: not JSON ({error}).") from error
        if not isinstance(row, dict):
            raise ValueError(f"{name}, line {number}: a row is a JSON object; this is {line[:40]}.")
        rows.append(row)
    return rows


def parse_parquet(content: bytes, name: str) -> list[Row]:
    """The rows in the bytes of a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{name}: not a Parquet file ({error}).") from error


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """All rows at once; a kill leaves the old file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(write_line(row) for row in rows))


def write_line(row: Mapping[str, Any]) -> str:
    line = json.dumps(row, ensure_ascii=False)
    # A text may hold half of a surrogate pair, which JSON can escape and UTF-8 cannot say.
    return (line if is_utf8(line) else json.dumps(row)) + "\n"


def is_utf8(text: str) -> bool:
    return SURROGATES.search(text) is None


def require_text(row: Row, field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: the field `{field}` must be a text; this row has {shorten(value)}."
        )
    return value


def require_texts(row: Row, field: str, where: str) -> list[str]:
    value = row.get(field)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(
            f"{where}: the field `{field}` must be a list of texts; this row has {shorten(value)}."
        )
    return value


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
