"""How a run's files are written and read: whole or not at all, with checksums, and nowhere else.

- A file is written under a temporary name, forced to the disk and renamed (`write_atomically`).
- A folder (of a stage, or inside one) is complete if it has a manifest, the list of its files with
  sizes and checksums, which is written last, and every file matches it.
- Files that grow line by line end each line with a checksum of the text before it, and perhaps of a
  place: what a line belongs to. Elsewhere the line counts as damaged.

      {"step": 1, "loss": 2.5, "check": "7f0a31c2"}
"""

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import xxhash

from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import hash_file, plain, visible_files

MANIFEST = "manifest.json"
STARTED = "started.json"
ENDING = "ending.json"  # of a training that --hours ends early: its last step
CARD = "README.md"  # of a model: its scores are written into it later, so it has no checksum
# An empty file of this name keeps its folder out of the manifest of the folder above: checkpoints
# are large, and useless after the run that wrote them has ended.
NO_RESULT = ".no_result"
HASH_THREADS = 8  # xxhash releases the GIL, so large checkpoints are read in parallel
CHAT_TEMPLATES = "additional_chat_templates"  # the one folder in a model's folder that is copied
SEALED_LINE = re.compile(rb'(\{.+), "check": "([0-9a-f]{8})"\}')


class DamagedArtifactError(UserError):
    """A file differs from what its manifest says; the message names the file."""


def seal_folder(folder: Path, facts: Mapping[str, object]) -> None:
    """Write the manifest, the last file of a folder: `facts`, and each file's size and checksum."""
    manifest = dict(facts) | {"files": describe_files(folder)}
    # The names too must be on the disk before the manifest that vouches for them.
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_directory(directory)
    write_sealed_json(folder / MANIFEST, manifest)


def verify_folder(folder: Path, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Check the files of a complete folder against its manifest, which is returned. The
    DamagedArtifactError names the first that differs. Files that the manifest does not list are
    ignored. Of `world` ranks each takes the checksums of its share."""
    manifest = read_sealed_json(folder / MANIFEST, "files")
    listed = manifest["files"]
    if not isinstance(listed, dict) or not all(isinstance(one, dict) for one in listed.values()):
        raise DamagedArtifactError(f"{folder / MANIFEST} is damaged: it holds another file's text.")
    files = {path_inside(folder, name, folder / MANIFEST): listed[name] for name in listed}
    for path, facts in files.items():
        if not path.is_file():
            raise DamagedArtifactError(f"{path} is missing, though {folder / MANIFEST} lists it.")
        if path.stat().st_size != facts["bytes"]:
            raise DamagedArtifactError(f"{path} is damaged: its manifest has another size.")
    mine = list(files)[rank::world]
    # Sizes of all files first: a cut-off file is found without reading any.
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        for path, checksum in zip(mine, pool.map(hash_file, mine), strict=True):
            if checksum != files[path]["xxh3"]:
                raise DamagedArtifactError(f"{path} is damaged: its manifest has another checksum.")
    for path in mine:
        if path.name == MANIFEST:  # the outer one lists an inner folder by its manifest alone
            verify_folder(path.parent)
    return manifest


def describe_files(folder: Path) -> dict[str, dict[str, int | str]]:
    """Size and checksum of each file. An inner folder with a manifest of its own is represented by
    that manifest: checkpoints are too large to read twice. A model's card has none."""
    sealed = {path.parent for path in folder.rglob(MANIFEST) if path.parent != folder}
    no_results = {path.parent for path in folder.rglob(NO_RESULT)}
    paths = [
        path
        for path in visible_files(folder)
        if path not in (folder / MANIFEST, folder / CARD)
        and not any(inner in path.parents and path != inner / MANIFEST for inner in sealed)
        and no_results.isdisjoint(path.parents)
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
    """DamagedArtifactError if a byte has changed, or if it is another file without these fields."""
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
    if path.is_dir():  # said here: the rename would end in a bare OSError
        refuse_unless_ours(path)
    with temporary_file(path).open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    # A rename is atomic within a file system: a rank that polls for the file never reads half.
    os.replace(file.name, path)
    sync_directory(path.parent)


def temporary_file(path: Path) -> Path:
    """Where new content is written at first. What is left there, perhaps a link, is removed."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    return temporary


def remove_leftovers(folder: Path) -> None:
    """Of what a killed process was writing: files, and folders (checkpoints, exports)."""
    for leftover in list(folder.rglob(".*.tmp")):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)  # it may have been in such a folder


def sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Line(NamedTuple):
    number: int  # from 1
    content: dict[str, Any] | None  # without the checksum; None: the line is damaged


def read_lines(path: Path, place: str = "") -> list[Line]:
    """None if there is no file. A last line that a kill left incomplete is left out."""
    return parse_lines(path.read_bytes() if path.is_file() else b"", place)


def parse_lines(content: bytes, place: str = "") -> list[Line]:
    """Without a place, lines without checksums are taken as they are, up to the first that has one:
    predictions.jsonl has its checksum in a manifest."""
    lines, any_sealed = [], bool(place)
    for number, text in enumerate(content.split(b"\n")[:-1], 1):  # -1: what a kill cut off, or ""
        intact = not any_sealed
        if sealed := SEALED_LINE.fullmatch(text):
            any_sealed = True
            intact = _line_checksum(sealed[1], place) == sealed[2].decode()
            text = sealed[1] + b"}"
        row = None
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(text) if intact else None
        lines.append(Line(number, row if isinstance(row, dict) and "check" not in row else None))
    return lines


def drop_torn_line(path: Path) -> None:
    """Remove a last line that a kill left incomplete, before lines are appended."""
    content = path.read_bytes() if path.is_file() else b""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with open_own_file(path, "r+b") as file:
            file.truncate(end)


def append_line(file: BinaryIO, content: Mapping[str, object], place: str = "") -> None:
    """Returns when it is on the disk."""
    file.write(sealed_lines([content], place))
    file.flush()
    os.fsync(file.fileno())


def sealed_lines(contents: Iterable[Mapping[str, object]], place: str = "") -> bytes:
    """A content has at least one field."""
    texts = [json.dumps(content)[:-1] for content in contents]
    lines = [f'{text}, "check": "{_line_checksum(text.encode(), place)}"}}\n' for text in texts]
    return "".join(lines).encode()


def _line_checksum(text: bytes, place: str) -> str:
    return f"{zlib.crc32(place.encode() + text):08x}"


def path_inside(folder: Path, name: object, source: Path, flat: bool = False) -> Path:
    """`folder / name`, of a name that the file `source` holds. flat: in the folder itself, not in
    one of its folders."""
    path = PurePosixPath(name if isinstance(name, str) else "")
    is_inside = path.parts and not path.is_absolute() and ".." not in path.parts
    if not is_inside or "\0" in str(path) or (flat and path.parts != (name,)):
        outside = f"the file {str(name)[:200]!r}, which is none in {folder}"
        raise UserError(f"{source} names {outside}. Fetch or make the folder again.")
    return folder / path


def refuse_foreign_links(folder: Path) -> None:
    """Refuse a model folder with a link to a file elsewhere: what is made of it, and perhaps
    published, would hold that file. Snapshots in the hub's cache are links to its `blobs`."""
    root = folder.resolve()
    hubs = [place.parent for place in root.parents if place.name == "snapshots"]
    homes = [root, *(hub / "blobs" for hub in hubs if hub.name.startswith("models--"))]
    files = [path for path in folder.glob("[!.]*") if not path.is_dir()]
    for path in sorted([*files, *folder.glob(f"{CHAT_TEMPLATES}/**/*")]):
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(home) for home in homes):
            advice = "If that file belongs to the model, put a copy of it there."
            raise UserError(f"{path} is a link to {target}, outside of the folder. {advice}")


def open_own_file(path: Path, mode: str) -> Any:
    """Like open(), but a link is refused: what it leads to is not ours to write. So is what is no
    file: a pipe would wait for a reader."""
    refuse_unless_ours(path)

    # O_NOFOLLOW: the path may have become a link since it was looked at.
    def follow_no_link(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(path, mode, opener=follow_no_link, encoding=None if "b" in mode else "utf-8")


def refuse_unless_ours(path: Path, is_folder: bool = False) -> None:
    """Refuse what is in the place of a file, or a folder, that is ours to write: a link, a pipe, a
    device, or a folder where a file should be."""
    if path.is_symlink():
        raise UserError(f"{path} is a link, so writing would change what it leads to. Remove it.")
    if path.exists() and not (path.is_file() or is_folder):
        kind = "a folder" if path.is_dir() else "a pipe or device"
        raise UserError(f"{path} is {kind}, where a file is to be written. Move it away.")
