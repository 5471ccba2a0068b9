"""Manifests: a folder's list of its own files with sizes and checksums, written last. A folder (of
a stage, or inside one) is complete if it has a manifest and every file matches it.

Files are written under a temporary name, forced to the disk and renamed, so a reader sees the whole
file or none.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from bosch.run.checkout import read_version
from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import hash_file, is_hidden, plain
from bosch.run.inside import path_inside, refuse_no_file

MANIFEST = "manifest.json"
STARTED = "started.json"
# An empty file of this name keeps its folder out of the manifest of the folder above: checkpoints
# are large, and useless after the run that wrote them has ended.
NO_RESULT = ".no_result"
HASH_THREADS = 8  # xxhash releases the GIL, so large checkpoints are read in parallel
# Packages whose versions are recorded.
PACKAGES = (
    "bosch-hybrid torch transformers accelerate datasets safetensors numpy PyNomadBBO liger-kernel"
)


class DamagedArtifactError(UserError):
    """A file differs from what its manifest says; the message names the file."""


def seal_folder(folder: Path, facts: Mapping[str, object]) -> None:
    """Write the manifest, the last file of a folder: `facts`, and each file's size and checksum."""
    manifest = dict(facts) | {"files": describe_files(folder)}
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_directory(directory)
    write_sealed_json(folder / MANIFEST, manifest)


def verify_folder(folder: Path) -> dict[str, Any]:
    """Check every file of a complete folder against its manifest, which is returned. The
    DamagedArtifactError names the first file that differs. Files that the manifest does not list,
    such as a reader's notes, are ignored.
    """
    manifest = read_sealed_json(folder / MANIFEST, "files")
    listed = manifest["files"]
    if not isinstance(listed, dict) or not all(isinstance(one, dict) for one in listed.values()):
        raise DamagedArtifactError(f"{folder / MANIFEST} is damaged: it holds another file's text.")
    files = {path_inside(folder, name, folder / MANIFEST): listed[name] for name in listed}
    for path, facts in files.items():
        if not path.is_file():
            raise DamagedArtifactError(f"{path} is missing, though {folder / MANIFEST} lists it.")
        if (size := path.stat().st_size) != facts["bytes"]:
            raise DamagedArtifactError(
                f"{path} is damaged: it has {size} bytes, but its manifest says {facts['bytes']}."
            )
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        for path, checksum in zip(files, pool.map(hash_file, files), strict=True):
            if checksum != files[path]["xxh3"]:
                raise DamagedArtifactError(
                    f"{path} is damaged: its checksum differs from the one in its manifest."
                )
    for path in files:
        if path.name == MANIFEST:
            verify_folder(path.parent)
    return manifest


def describe_files(folder: Path) -> dict[str, dict[str, int | str]]:
    """Size and checksum of each file. An inner folder with a manifest of its own is represented by
    that manifest: checkpoints are too large to read twice."""
    sealed = {path.parent for path in folder.rglob(MANIFEST) if path.parent != folder}
    no_results = {path.parent for path in folder.rglob(NO_RESULT)}
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not is_hidden(path, folder)
        and path != folder / MANIFEST
        and not any(inner in path.parents and path != inner / MANIFEST for inner in sealed)
        and not any(inner in path.parents for inner in no_results)
    ]
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        checksums = pool.map(lambda path: hash_file(path, sync=True), paths)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "xxh3": checksum}
        for path, checksum in zip(paths, checksums, strict=True)
    }


def write_sealed_json(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON that carries its own checksum, so that a flipped byte is found."""
    write_atomically(path, _sealed_text(plain(content)))


def read_sealed_json(path: Path, *needed: str) -> dict[str, Any]:
    """What write_sealed_json wrote; DamagedArtifactError if a byte has changed since, or if it is
    another file, which lacks a needed field."""
    try:
        text = path.read_bytes().decode()
        content = json.loads(text)
        del content["checksum"]
        intact = _sealed_text(content) == text and all(name in content for name in needed)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError(f"{path} does not exist.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise DamagedArtifactError(f"{path} is damaged: its content does not match its checksum.")
    return content


def _sealed_text(content: dict[str, object]) -> str:
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(content, indent=1).encode())
    return json.dumps(content | {"checksum": checksum}, indent=1) + "\n"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole: after a kill at any point, the old or the new content is there."""
    if path.is_dir():
        refuse_no_file(path)
    with temporary_file(path).open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    # A rename is atomic within a file system: a rank that polls for the file never reads half.
    os.replace(file.name, path)
    sync_directory(path.parent)


def temporary_file(path: Path) -> Path:
    """Where the new content of a file is written. What a killed process left there is removed, and
    also a link, which would be followed."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    return temporary


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process was writing: temporary files of write_atomically, and folders
    (checkpoints, exports) that have such a name until they are complete."""
    for leftover in list(folder.rglob(".*.tmp")):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)  # it may have been in such a folder


def sync_directory(folder: Path) -> None:
    """Force a folder's entries (a rename, a new file) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.cache
def provenance() -> dict[str, object]:
    """What produced a result, for its manifest: package versions and the commit of this code."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["bosch-hybrid"] = read_version()
    return {"packages": versions, "commit": _commit()}


def _commit() -> str | None:
    """The commit of this code, with -dirty after uncommitted changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
