"""The files of a model's folder, before any weight is loaded."""

import functools
import json
from pathlib import Path
from typing import Any

from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import MANIFEST, path_inside
from bosch.run.fingerprint import fingerprint, hash_file

INDEX = "model.safetensors.index.json"  # which file holds which tensor
TOKENIZER_CONFIG = "tokenizer_config.json"
MOST_LEVELS = 100  # of lists and objects in a JSON file; Python copies no more than about 300


def read_json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        problem = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise MissingFileError(f"{path} {problem}.")
    try:
        content = json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:  # a JSONDecodeError or UnicodeDecodeError
        raise UserError(f"{path} is not a valid JSON file: {error}.") from error
    if _is_deeper(content, MOST_LEVELS):
        raise UserError(f"{path} is nested more than {MOST_LEVELS} levels deep; fetch it again.")
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; it must hold a JSON object.")
    return content


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(each, levels - 1) for each in inner)


def is_trained(folder: Path) -> bool:
    """Whether a training of ours wrote this model: training/export.py says what it began with."""
    manifest = folder / MANIFEST
    return manifest.is_file() and "source" in read_json_object(manifest)


def weight_names(index: Path) -> list[str]:
    """The files that an index names, all beside it."""
    weights = read_json_object(index).get("weight_map")
    if not isinstance(weights, dict):
        raise UserError(f"{index} has no weight_map; fetch or save the model once more.")
    files = [path_inside(index.parent, name, index, flat=True) for name in weights.values()]
    return sorted({file.name for file in files})


def hash_weights(folder: Path) -> str | None:
    # All that changes when a file is written again: its checksum is computed once a process, and
    # anew if any of this differs.
    stats = [(path, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    files = tuple((p, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in stats)
    return _hash_files(files) if files else None


@functools.lru_cache
def _hash_files(files: tuple[tuple[Path, int, int, int, int], ...]) -> str:
    """By names and content. A process asks several times, and a model may have 60 GB: `files` holds
    what changes with the content."""
    return fingerprint({path.name: hash_file(path) for path, *_ in files})
