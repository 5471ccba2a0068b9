"""A small file system, for tests of a full disk."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of this size, mounted at `folder`. The test is skipped if mounting fails."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k"]
    try:
        subprocess.run(["mount", *options, "none", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no small file system can be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
