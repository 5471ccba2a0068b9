"""How much memory a piece of work takes at its peak, and how it shows when there is not enough."""

import re
from pathlib import Path

import torch

PROCESS = Path("/proc/self")


class PeakMemory:
    """The peak since it was made: of torch's allocations on a GPU, of the whole process on Linux,
    else unknown.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_told = device.type == "cuda" or _forget_resident_peak()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> int | None:
        if not self._is_told:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        found = re.search(r"VmHWM:\s+(\d+) kB", (PROCESS / "status").read_text())
        return int(found[1]) * 1024 if found else None


def _forget_resident_peak() -> bool:
    """Start the count of the resident peak (VmHWM) anew. False where the system has none."""
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # What torch's allocator of host memory raises has no class of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
