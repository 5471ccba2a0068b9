"""Files of JSON lines, to which a process that may be killed appends."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file, none if there is no file. A last one that a kill tore is cut off it."""
    content = path.read_bytes() if path.is_file() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return content[:whole].splitlines()


def append_line(file: BinaryIO, content: dict[str, Any]) -> None:
    """On the disk before the work goes on."""
    file.write(json.dumps(content).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
