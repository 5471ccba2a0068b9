"""Peak memory of a piece of work, and recognizing out-of-memory errors."""

import re
from pathlib import Path

import torch

PROCESS = Path("/proc/self")


class PeakMemory:
    """The peak since this was made: of torch's allocations on a GPU, else of the whole process,
    which only Linux knows.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_known = device, True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            (PROCESS / "clear_refs").write_text("5")  # resets VmHWM
        except OSError:
            self._is_known = False

    def read(self) -> int | None:
        if not self._is_known:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = re.search(r"VmHWM:\s+(\d+) kB", (PROCESS / "status").read_text())
        return int(peak[1]) * 1024 if peak else None


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # torch's allocator of host memory has no error class of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
