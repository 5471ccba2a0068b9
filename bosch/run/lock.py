"""One process at a time in a folder: it holds `.lock`, which the kernel releases when the process
ends, however it ends. The text in it names the owner. On a file system without locks the file's
existence is the lock: a killed owner on another machine blocks the folder until it is deleted.
"""

import contextlib
import errno
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from bosch.run.errors import UserError
from bosch.run.files import refuse_link, refuse_no_file

LOCK = ".lock"
POLL_SECONDS = 0.2


class FolderInUseError(UserError):
    """A running process uses the folder; the message names it."""


class FolderLock:
    """Holds the lock of a folder until the `with FolderLock(folder):` block or the process ends.
    wait: for a folder that is in use, instead of raising FolderInUseError."""

    def __init__(self, folder: Path, say: Callable[[str], None] = print, wait: bool = False):
        self.folder, self.say, self.wait = folder, say, wait
        self._lock = FileLock(folder / LOCK)

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
            # FileNotFoundError: where no folder can be, as in /proc.
            advice = "choose another folder (--run-dir or --out), or move the file away"
            raise UserError(f"{self.folder} cannot be made: {error.strerror}; {advice}.") from error
        path = self.folder / LOCK
        refuse_link(path)
        refuse_no_file(path)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            owner = "another process"
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if text := re.fullmatch(r"(pid \d+ on host \S+)\n", path.read_text()):
                    owner = text[1]
            if not self.wait:
                advice = "wait until it ends, or choose another folder (--run-dir or --out)"
                raise FolderInUseError(f"{self.folder} is in use by {owner}; {advice}.") from None
            self.say(f"{self.folder} is in use by {owner}: waiting for it")
            self._lock.acquire(poll_interval=POLL_SECONDS)
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOLCK:
                raise
            raise UserError(f"{path} cannot be locked: {error}; choose another disk.") from error
        path.write_text(f"pid {os.getpid()} on host {platform.node()}\n")
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
