"""The memory of this machine: how torch takes that of its GPUs, and how much the host has left."""

import os
import sys

# Where torch looks for settings of its allocator; it prefers the second, which is older.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


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
