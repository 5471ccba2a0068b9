"""How much memory a piece of work takes at its peak, and how it shows when there is not enough."""

import contextlib
import re
from collections.abc import Iterator
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
        return _status_bytes("VmHWM")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # What torch's allocator of host memory raises has no class of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


@contextlib.contextmanager
def limit_memory(device: torch.device, gigabytes: float | None) -> Iterator[None]:
    """Let no more than this be taken: on a GPU all that torch holds, as on a smaller one; on a CPU
    what comes on top of what the process has now (Linux).
    """
    if gigabytes is None:
        yield
    elif device.type == "cuda":
        share = gigabytes * 1e9 / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(
            resource.RLIMIT_AS, (_status_bytes("VmSize") + int(gigabytes * 1e9), hard)
        )
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _forget_resident_peak() -> bool:
    """Start the count of the resident peak (VmHWM) anew. False where the system has none."""
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", (PROCESS / "status").read_text())
    if found is None:
        raise ValueError(
            f"this system does not tell {name} of a process, so it cannot be limited here."
        )
    return int(found[1]) * 1024
