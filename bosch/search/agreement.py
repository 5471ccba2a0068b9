"""How the ranks of a search stay together: each runs the same deterministic search, scores its
share of the examples, and takes from rank 0 what only one of them may decide.

    value = agree(propose() if is_first() else None)    # what rank 0 has, on every rank
    shares = gather(mine)                               # what each rank has, on every rank

Both are collective: each rank calls them, in the same order. With one process they cost nothing.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from bosch.run.ranks import rank_and_world

# A rank waits while another runs its share of an evaluation or an optimizer makes up its mind. The
# default of half an hour would end a search whose rank 0 is kept waiting by a disk. A rank that
# dies is noticed at once.
TIMEOUT = timedelta(days=1)
_joins = itertools.count()  # of this launch, the same on every rank


@contextmanager
def joined() -> Iterator[None]:
    """The ranks of this launch as one process group, unless there is one already. Only small
    objects are exchanged, so it is gloo on GPUs too.
    """
    _, world = rank_and_world()
    if world == 1 or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # Names of its own in the launcher's store: training makes the next group of this launch, and
    # would find the addresses of this one, where nobody listens any more.
    store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
    own = dist.PrefixStore(f"search {next(_joins)}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_and_size() -> tuple[int, int]:
    """This process among those that search together."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


def is_first() -> bool:
    return rank_and_size()[0] == 0


def agree(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if rank_and_size()[1] == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: Any) -> list[Any]:
    """Every rank's value, by rank, on every rank."""
    size = rank_and_size()[1]
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value)
    return values
