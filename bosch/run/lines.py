"""Files of JSON lines that grow line by line, and survive a kill of the process that appends. Each
line ends with a checksum of the text before it, so that its reader finds damage:

    {"step": 1, "loss": 2.5, "check": "7f0a31c2"}

Lines of earlier versions have no checksum. They are read as they are, up to the first that has one.
A checksum may also cover a place: what a line belongs to. Elsewhere the line counts as damaged.
"""

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from bosch.run.inside import open_own_file

SEALED = re.compile(rb'(\{.+), "check": "([0-9a-f]{8})"\}')
DAMAGED_NAME = re.compile(rb', ".{5}": ".{8}"\}$')  # the name of a checksum with a flipped bit


class Line(NamedTuple):
    number: int  # from 1
    content: dict[str, Any] | None  # without the checksum; None: the line is damaged


def read_lines(path: Path, place: str = "") -> list[Line]:
    """The lines of a file; none if there is no file. A last line that a kill left incomplete is
    left out."""
    return parse_lines(path.read_bytes() if path.is_file() else b"", place)


def parse_lines(content: bytes, place: str = "") -> list[Line]:
    lines = []
    any_sealed = bool(place)  # earlier versions wrote no place
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        sealed = SEALED.fullmatch(text)
        any_sealed = any_sealed or sealed is not None
        if sealed is not None:
            intact = _checksum(sealed[1], place) == sealed[2].decode()
        else:
            intact = not any_sealed and not DAMAGED_NAME.search(text)
        value = _parse(sealed[1] + b"}" if sealed else text) if intact else None
        is_line = isinstance(value, dict) and "check" not in value
        lines.append(Line(number, value if is_line else None))
    return lines


def drop_torn_line(path: Path) -> None:
    """Remove a last line that a kill left incomplete, before lines are appended."""
    content = path.read_bytes() if path.is_file() else b""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with open_own_file(path, "r+b") as file:
            file.truncate(end)


def append_line(file: BinaryIO, content: Mapping[str, object], place: str = "") -> None:
    """Append a line and wait until it is on the disk."""
    file.write(sealed_lines([content], place))
    file.flush()
    os.fsync(file.fileno())


def sealed_lines(contents: Iterable[Mapping[str, object]], place: str = "") -> bytes:
    """Lines with their checksums. A content has at least one field."""
    texts = (json.dumps(content)[:-1] for content in contents)
    return b"".join(
        f'{text}, "check": "{_checksum(text.encode(), place)}"}}\n'.encode() for text in texts
    )


def _checksum(text: bytes, place: str) -> str:
    return f"{zlib.crc32(place.encode() + text):08x}"


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
