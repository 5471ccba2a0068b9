"""Memory of a test's process and its children together, as Linux tells it."""

import os
import threading
from pathlib import Path


class PeakMemory:
    """The most that this process and its children held at any of the moments looked at."""

    def __enter__(self) -> "PeakMemory":
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.bytes = max(self.bytes, resident_bytes())


def resident_bytes() -> int:
    """Resident memory of this process and its children, as Linux tells it."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    total = 0
    for process in [str(own), *children]:
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total
