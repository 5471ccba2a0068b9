"""Reads and writes rows of data sets and predictions: JSONL (one JSON object per line), plain or
gzipped, and Parquet. Finds the files of a data set."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bosch.data.sources.files import rows_of
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import write_atomically
from bosch.run.hub import prepare_hub

Row = dict[str, Any]
KINDS: dict[type, str] = {str: "a string", list: "a list of strings", int: "a whole number"}


def read_rows(path: Path) -> list[Row]:
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist; name a JSONL file, an object per line.")
    return [row for _, row in rows_of(path)]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write all rows at once; a kill leaves the old file, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def require(row: Row, where: str, kind: type, *names: str) -> None:
    """UserError if a field of this name is not of the kind; lists must hold strings."""
    for name in names:
        value = row.get(name)
        items = value if isinstance(value, list) else []
        if not isinstance(value, kind) or not all(isinstance(item, str) for item in items):
            raise UserError(
                f"{where}: the field `{name}` must be {KINDS[kind]}, not {value!r:.60}."
            )


def require_count(rows: Sequence[Row], num_rows: int, name: str, where: str) -> None:
    if len(rows) != num_rows:
        raise UserError(f"{where} has {len(rows)} rows, not {num_rows} as {name}. Get all of them.")


def find_one(folder: Path, subfolder: str, name: str, patterns: Sequence[str]) -> Path:
    """The one file of a data set in a folder or its subfolder: JSONL, or one of the patterns."""
    files = [
        path
        for place in (folder, folder / subfolder)
        for pattern in ("{}.jsonl", "{}.jsonl.gz", *patterns)
        for path in sorted(place.glob(pattern.format(name)))
    ]
    return Path(the_only([str(path) for path in files], name, folder))


def the_only(files: Sequence[str], name: str, place: Path) -> str:
    if not files:
        raise MissingFileError(
            f"{place} has no data set {name}; add a file {name}.jsonl, .jsonl.gz or .parquet."
        )
    if len(files) > 1:
        raise UserError(f"{place} has {name} more than once: {', '.join(files)}. Keep one of them.")
    return files[0]


def load_rows(path: Path, what: str, forms: str, split: str, *config: str) -> list[Row]:
    """From a file, or from the hub if there is none of this name."""
    if path.is_file():
        return read_rows(path)
    with from_hub(str(path), what, forms):
        from datasets import load_dataset

        return load_dataset(str(path), *config, split=split).to_list()


@contextmanager
def from_hub(hub_id: str, what: str, forms: str) -> Iterator[None]:
    """For a source that is not a local path: errors of the hub, its cache or the network become one
    sentence. `forms`: what a source may be."""
    # Else a mistyped path would be asked of the hub, and the answer would speak of the network.
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id):
        raise MissingFileError(f"{hub_id} does not exist. Name {forms}.")
    prepare_hub()
    try:
        yield
    except Exception as error:
        raise MissingFileError(
            f"{hub_id} is not a file or folder here, and the hub gave no {what} "
            f"({type(error).__name__}). Name its path, after `hf download {hub_id} --repo-type "
            "dataset --local-dir DIR`."
        ) from error
