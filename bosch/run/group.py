"""Small decisions that the ranks of a search or a training make together.

    value = agree(propose() if is_first() else None)    # rank 0's value, on every rank
    shares = Group.current().gather(mine)               # every rank's value, on every rank
    Group.current().all_succeed(write_my_part)          # an error on one rank is raised on all

They use a gloo group of their own, and never wait for a GPU. Every rank must make every call, in
the same order. For waits that are too long for a collective, see bosch/run/ranks.py.
"""

import functools
import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from bosch.run.ranks import rank_and_world

T = TypeVar("T")
# A rank may wait long while another runs its share of an evaluation or writes to a slow disk; the
# default of half an hour would end the search. A rank that dies is noticed at once anyway.
TIMEOUT = timedelta(days=1)
_joins = itertools.count()  # counts the groups of this launch, the same on every rank


class Group:
    """The ranks of the current process group."""

    def __init__(self) -> None:
        is_joined = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if is_joined else (0, 1)

    @staticmethod
    def current() -> "Group":
        """The same object for as long as the process group stays the same."""
        return _group_of(dist.group.WORLD if dist.is_available() else None)

    @functools.cached_property
    def gloo(self) -> dist.ProcessGroup | None:
        """Made at the first decision; None for one process."""
        return dist.new_group(backend="gloo", timeout=TIMEOUT) if self.world > 1 else None

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """The result of `make` on rank 0, on every rank; its error too is raised on every rank."""
        if self.world == 1:
            return make()
        result, own_error = _attempt(make) if self.rank == 0 else (None, None)
        message: list[Any] = [result, _as_sent(own_error)]
        dist.broadcast_object_list(message, src=0, group=self.gloo)
        if (error := own_error or message[1]) is not None:
            raise error
        return cast(T, message[0])

    def all_succeed(self, do: Callable[[], T]) -> T:
        """Run `do` on every rank, each on its own. An error on one rank is raised on all, so that
        none goes on alone. `do` must not wait for other ranks."""
        with self.succeeding():
            result = do()
        return result

    @contextmanager
    def succeeding(self) -> Iterator[None]:
        """As `all_succeed`, around a block: what raises in it on one rank ends it on all."""
        if self.world == 1:
            yield
            return
        own_error: Exception | None = None
        try:
            yield
        except Exception as error:
            own_error = error
        # This rank's own error first: it has the traceback.
        for failed in [own_error, *self.gather(_as_sent(own_error))]:
            if failed is not None:
                raise failed

    def gather(self, value: T) -> list[T]:
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, group=self.gloo)
        return values

    def sum(self, *values: float) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        if self.world > 1:
            dist.all_reduce(total, group=self.gloo)
        return total.tolist()


@functools.lru_cache(maxsize=1)
def _group_of(process_group: object) -> Group:
    return Group()


def _attempt(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return do(), None
    except Exception as error:
        return None, error


def _as_sent(error: Exception | None) -> Exception | None:
    """As other ranks can receive it: they would wait forever for what cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def rank_and_size() -> tuple[int, int]:
    return Group.current().rank, Group.current().world


def is_first() -> bool:
    return Group.current().rank == 0


def agree(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return Group.current().from_rank_0(lambda: value)


def hide_fsdp() -> None:
    """From transformers, which would leave the weights of all ranks but the first for FSDP to fill.
    Every launch with --use_fsdp sets these; training reads other variables."""
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ.pop(name, None)


@contextmanager
def joined() -> Iterator[None]:
    """Join the ranks of this launch in a process group, unless there is one already. Of gloo, as
    only small objects are exchanged."""
    _, world = rank_and_world()
    if world == 1 or dist.is_initialized():
        yield
        return
    hide_fsdp()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # A prefix in the launcher's store: training makes the next group of this launch, and would
    # otherwise find the addresses of this one, where nobody listens any more.
    store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
    store = dist.PrefixStore(f"search {next(_joins)}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        yield
    finally:
        _group_of.cache_clear()
        dist.destroy_process_group()
