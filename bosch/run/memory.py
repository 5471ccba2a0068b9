"""What this machine gives a program: cores, memory, GPUs; and how torch takes memory of those."""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

# Where torch looks for settings of its allocator; it prefers the second, which is older.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
THREADS = "OMP_NUM_THREADS"
TRUE = {"1", "true", "yes", "on"}  # as accelerate writes variables
OURS = "BOSCH_SET"  # names, with commas, the variables that we have set and not the user
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
    set_variable(ALLOCATOR_VARIABLES[0], EXPANDABLE)
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
    for folder, is_old in _cgroup_folders(root, "memory"):
        with suppress(OSError, ValueError):  # not there, or `max`: no limit
            found.append(_left_in(folder, *(OLD_CGROUP_FILES if is_old else CGROUP_FILES)))
    return min(found, default=None)


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use, also within the limits of a container or a cluster's
    job: `docker --cpus 2` shows all cores, and gives the time of two."""
    # On Linux those that a cluster's scheduler sets.
    cores = len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0))
    for folder, is_old in _cgroup_folders(root, "cpu"):
        with suppress(OSError, ValueError):  # not there, or `max`: no limit
            if is_old:
                quota, period = (
                    int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
                )
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            if quota > 0:  # -1: no limit
                cores = min(cores, math.ceil(quota / period))
    return max(1, cores)


def use_no_more_threads() -> None:
    """Let torch take as many threads as there are cores to use, unless the user has set them: it
    sees all cores of the machine, and threads that wait for their turn hold up the others."""
    cores = usable_cores()
    if THREADS not in os.environ and cores < (os.cpu_count() or 1):
        set_variable(THREADS, str(cores))  # read when torch is imported


def set_variable(name: str, value: str) -> None:
    """For libraries of this process. Programs that it starts may be better off without
    (`for_launchers`)."""
    names = [*filter(None, os.environ.get(OURS, "").split(",")), name]
    os.environ |= {name: value, OURS: ",".join(dict.fromkeys(names))}


def for_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what we have set, for a program that decides for itself: accelerate would give each
    process of a machine as many threads, the servers of vLLM that share a model among GPUs end
    under the allocator's setting, and a hub that could not be reached may be back."""
    ours = {OURS, *environment.get(OURS, "").split(",")}
    return {name: value for name, value in environment.items() if name not in ours}


def has_gpu(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether there is a GPU that the user has not kept us from (ACCELERATE_USE_CPU)."""
    import torch

    keeps_off = environment.get("ACCELERATE_USE_CPU", "").lower() in TRUE
    return torch.cuda.is_available() and not keeps_off


def is_old_gpu() -> bool:
    """Whether the GPU here is older than Ampere, as a T4 or V100 is: it has no bf16, which torch
    only emulates, and Triton, for Liger's kernels and compiled code, does not support it."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)


def _cgroup_folders(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Those whose limits count for this process, and whether they are of cgroups version 1."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            is_old = controller in controllers.split(",")
            if controllers and not is_old:
                continue
            base = root / "sys/fs/cgroup"
            # A limit counts for all below it. In a container the name may be that outside of it.
            inner = Path(name.strip("/"))
            for part in dict.fromkeys((inner, *inner.parents)):
                yield (base / controller if is_old else base) / part, is_old


def least(found: Iterable[float | None]) -> float | None:
    """Of all ranks' memory; None if no rank knows."""
    return min((each for each in found if each is not None), default=None)


def _left_in(folder: Path, limit: str, used: str, prefix: str) -> int:
    most, taken = (int((folder / name).read_text()) for name in (limit, used))
    lines = map(str.split, (folder / "memory.stat").read_text().splitlines())
    cached = [f"{prefix}inactive_file", f"{prefix}active_file"]
    return max(0, most - taken + sum(int(count) for name, count in lines if name in cached))
