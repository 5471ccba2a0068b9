"""Fingerprints: a hash of everything that decides a result, so that equal work is recognized and
reused. A stage's covers its name, version, settings and the fingerprints of its inputs, so it is
known before anything has run, and a change early in the chain changes all later ones.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from bosch.run.errors import MissingFileError, UserError

T = TypeVar("T")

_AFFECTS_RESULT = "affects_result"


def speed_only(default: T) -> T:
    """A config field that affects speed but not the result; fingerprints leave it out."""
    return dataclasses.field(default=default, metadata={_AFFECTS_RESULT: False})


def fingerprint(value: object) -> str:
    """32 hexadecimal digits that identify `value` (settings and mappings, nested at will)."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def fingerprint_files(folder: Path) -> str:
    """Of the content of all visible files below a folder that no stage wrote."""
    if not (files := visible_files(folder)):
        raise MissingFileError(f"{folder} holds no files; pass a folder with those of the input.")
    return fingerprint({path.relative_to(folder).as_posix(): hash_file(path) for path in files})


def visible_files(folder: Path) -> list[Path]:
    """All files below a folder, sorted. Names that begin with a dot are bookkeeping."""
    # Sorted: a file system lists in any order, and the fingerprint must not depend on it.
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in paths if "/." not in f"/{path.relative_to(folder).as_posix()}"]


def hash_file(path: Path, sync: bool = False) -> str:
    """xxh3 (128 bits) of a file. sync: force its bytes to the disk first, for a manifest."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def plain(value: object) -> Any:
    """`value` as JSON: dataclasses become dicts without speed-only fields, and 1.0 becomes 1."""
    if value is None or isinstance(value, str | int):  # first, as almost all values are these
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if f.metadata.get(_AFFECTS_RESULT, True)]
        return {f.name: plain(getattr(value, f.name)) for f in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            # JSON has no nan, and nan != nan: a run with it would never be recognized.
            raise UserError(f"A setting is {value}; it must be a finite number. None is 'off'.")
        return int(value) if value.is_integer() else value
    raise TypeError(f"A setting of type {type(value).__name__} has no JSON form: {value!r}")
