"""Files of JSON lines that survive a kill of the process that appends to them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from bosch.run.inside import open_own_file


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file; none if there is no file. A last line that a kill left incomplete is
    removed from the file."""
    content = path.read_bytes() if path.is_file() else b""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with open_own_file(path, "r+b") as file:
            file.truncate(end)
    return content[:end].splitlines()


def append_line(file: BinaryIO, content: Mapping[str, object]) -> None:
    """Append a line and wait until it is on the disk."""
    file.write(json.dumps(content).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
