"""While a checkpoint is evaluated, the training waits in host memory: the evaluation has a whole
model on every GPU, beside this training's share. For 30B that is 366 GB on one machine, so a
training that evaluates asks for the room before its first step, as do `bosch recover` at its start
and the dry run (training/rehearsal.py).
"""

import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bosch.masks.mask import describe_bytes
from bosch.run.dist import Ranks
from bosch.run.errors import UserError
from bosch.run.memory import available_host_bytes, least

MOMENTS, STEP_BYTES = 2, 4  # that AdamW has of each tensor: as large as it, and a number


@contextmanager
def parked(tensors: Iterable[Tensor], pins: bool = False) -> Iterator[None]:
    """Inside, this rank's part of the tensors waits in host memory, and its own memory is free for
    others. It comes back at the same place of the same tensors, as fully_shard needs. `pins`: in
    pinned memory, which is copied faster, as far as the system allows it."""
    kept, is_pinned = [], pins
    for storage in storages_of(tensors):
        host, is_pinned = host_memory(storage.nbytes(), is_pinned)
        kept.append((storage, host.copy_(storage)))
        # The storage itself stays, with its tensors' views of it: only its memory is given back.
        storage.resize_(0)
        del host  # `kept` alone holds it, so that below each is freed before the next comes back
    try:
        yield
    finally:
        while kept:
            storage, host = kept.pop()
            storage.resize_(host.nbytes())
            storage.copy_(host)
            del host
        # torch would keep what was pinned for itself. Builds for CPUs lack this.
        if pins and (give_back := getattr(torch._C, "_host_emptyCache", None)):
            give_back()


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Of this rank's parts, each once."""
    parts = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return list({each.data_ptr(): each for each in map(Tensor.untyped_storage, parts)}.values())


def host_memory(num_bytes: int, pins: bool) -> tuple[torch.UntypedStorage, bool]:
    """And whether it is pinned."""
    # Tried, not computed: the limit may be that of the process, of its container or of both.
    if pins:
        try:
            pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            return pinned.untyped_storage(), True
        except RuntimeError:  # systems limit it
            pass
    return torch.UntypedStorage(num_bytes), False


def sizes_to_park(tensors: Iterable[Tensor], optimizer: Optimizer) -> list[int]:
    """Bytes of each storage that a rank will park, counted before a first step has made the
    optimizer's moments. `tensors`: what it would park now."""
    now = list(tensors)
    sizes, parked_now = [each.nbytes() for each in storages_of(now)], set(map(id, now))
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        # Moments that are there, as in a resumed run, are among `tensors`.
        if id(parameter) in parked_now and not optimizer.state.get(parameter):
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            sizes += [own.nbytes] * MOMENTS + [STEP_BYTES]
    return sizes


def check_parking(sizes: Sequence[int], ranks: Ranks) -> bool:
    """Refuse, on all ranks, what the ranks of one machine have no room for. Whether it can be
    pinned there, for which torch takes the next power of two."""
    pinned = sum(1 << (size - 1).bit_length() for size in sizes if size)
    own = platform.node(), sum(sizes), pinned, available_host_bytes()
    here = [other for other in ranks.gather(own) if other[0] == own[0]]
    # Of the ranks' readings the least: they were taken one after another.
    _, needed, to_pin, available = zip(*here, strict=True)
    room = least(available)
    ranks.all_succeed(lambda: check_host_memory(sum(needed), room, len(here), own[0]))
    return room is not None and 0 < sum(to_pin) <= room


def check_host_memory(
    num_bytes: int, available: float | None, num_gpus: int, machine: str = "each machine"
) -> None:
    if available is not None and num_bytes > available:
        raise UserError(
            "while a checkpoint is evaluated, the training waits in host memory: "
            f"{describe_bytes(num_bytes)} of {machine} for its {num_gpus} GPUs, and only "
            f"{describe_bytes(available)} are available. Give the job more (SLURM: --mem=0), use "
            "more machines with train.shard_within_node False, train fewer weights "
            "(train.trained), or train with `bosch train` and evaluate afterwards."
        )
