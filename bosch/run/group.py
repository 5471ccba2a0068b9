"""Small decisions that the ranks of a search or a training take together.

    value = agree(propose() if is_first() else None)    # what rank 0 has, on every rank
    shares = gather(mine)                               # what each rank has, on every rank
    Group.current().all_succeed(write_my_part)          # or the error of one, on every rank

They travel over a gloo group of their own, on the CPU: nothing of it waits for a GPU, and it mixes
with no other traffic. Every rank makes every call, in the same order; with one process all of it is
plain Python. Waits that no collective can stand: bosch/run/ranks.py.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from bosch.run.ranks import rank_and_world

T = TypeVar("T")
# A rank waits while another runs its share of an evaluation, or writes to a slow disk. The default
# of half an hour would end a search for that. A rank that dies is noticed at once.
TIMEOUT = timedelta(days=1)
_joins = itertools.count()  # of this launch, the same on every rank


class Group:
    """The ranks that work together now."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)

    @staticmethod
    def current() -> "Group":
        """The same object as long as there is the same process group."""
        return _group_of(dist.group.WORLD if dist.is_available() else None)

    @functools.cached_property
    def gloo(self) -> Any:
        """The process group; None for one process. Made with the first decision."""
        return dist.new_group(backend="gloo", timeout=TIMEOUT) if self.world > 1 else None

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on every rank; or its error, on every rank."""
        if self.world == 1:
            return make()
        message: list[Any] = [None, None]
        if self.rank == 0:
            try:
                message[0] = make()
            except Exception as error:
                message[1] = error
        dist.broadcast_object_list(message, src=0, group=self.gloo)
        if message[1] is not None:
            raise message[1]
        return message[0]

    def all_succeed(self, do: Callable[[], T]) -> T:
        """Everybody does it, each for itself. An error of one rank is raised on all: nobody goes
        on alone. `do` must not wait for other ranks."""
        if self.world == 1:
            return do()
        result, error = None, None
        try:
            result = do()
        except Exception as caught:
            error = caught
        for found in [error, *self.gather(error)]:  # its own first: that one has a traceback
            if found is not None:
                raise found
        return cast(T, result)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, group=self.gloo)
        return values


@functools.lru_cache(maxsize=1)
def _group_of(process_group: object) -> Group:
    return Group()


def rank_and_size() -> tuple[int, int]:
    """This process among those that work together."""
    return Group.current().rank, Group.current().world


def is_first() -> bool:
    return Group.current().rank == 0


def agree(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return Group.current().from_rank_0(lambda: value)


def gather(value: Any) -> list[Any]:
    """Every rank's value, by rank, on every rank."""
    return Group.current().gather(value)


@contextmanager
def joined() -> Iterator[None]:
    """The ranks of this launch as one process group, unless there is one already; gloo on GPUs
    too, since only small objects are exchanged."""
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
        _group_of.cache_clear()
        dist.destroy_process_group()
