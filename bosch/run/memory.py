"""The memory of this machine: how torch takes that of its GPUs, and how much the host has left."""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# Where torch looks for settings of its allocator; it prefers the second, which is older.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
# Of cgroups version 2 and 1: the limit, what is used, and what of it are cached files, which the
# system drops when memory is asked for.
CGROUP_FILES = ("memory.max", "memory.current", "")
OLD_CGROUP_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def use_expandable_segments() -> None:
    """Let torch's segments of GPU memory grow, in this process and those that it starts, unless the
    user has set either variable. Packed documents, checkpoints and evaluations ask for other sizes
    each time, and what fixed segments leave between them cannot be used."""
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return
    os.environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE
    # torch reads the variable when it first needs a setting, in some versions when it is imported.
    if (torch := sys.modules.get("torch")) is not None:
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE)


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """What may still be taken of this machine's memory, also within the limits of a container or a
    cluster's job (cgroups). None where there is no Linux to ask."""
    found = []
    with suppress(OSError, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            base, files = root / "sys/fs/cgroup", CGROUP_FILES
            if "memory" in controllers.split(","):
                base, files = base / "memory", OLD_CGROUP_FILES
            elif controllers:
                continue
            # A limit counts for all below it. In a container the name may be that outside of it.
            inner = Path(name.strip("/"))
            for folder in {base / part for part in (inner, *inner.parents)}:
                with suppress(OSError, ValueError):  # not there, or `max`: no limit
                    found.append(_left_in(folder, *files))
    return min(found, default=None)


def least(found: Iterable[float | None]) -> float | None:
    """Of all ranks' memory; None if no rank knows."""
    return min((each for each in found if each is not None), default=None)


def _left_in(folder: Path, limit: str, used: str, prefix: str) -> int:
    most, taken = (int((folder / name).read_text()) for name in (limit, used))
    lines = map(str.split, (folder / "memory.stat").read_text().splitlines())
    cached = [f"{prefix}inactive_file", f"{prefix}active_file"]
    return max(0, most - taken + sum(int(count) for name, count in lines if name in cached))
