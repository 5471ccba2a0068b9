"""Small decisions that all ranks take together: rank 0 chooses, or everybody succeeds, or one asks.

They travel over a gloo group of their own, on the CPU: nothing of it waits for a GPU, and it mixes
with no other traffic. With one process every call is plain Python.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from training.parallel import COLLECTIVE_TIMEOUT

T = TypeVar("T")


class Consensus:
    """Made by all ranks at the same place of the program, as any process group is."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group = (
            dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if self.world > 1 else None
        )

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
        dist.broadcast_object_list(message, src=0, group=self.group)
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
        for found in [error, *self.collect(error)]:  # its own first: that one has a traceback
            if found is not None:
                raise found
        return cast(T, result)

    def collect(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        values = [value] * self.world
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def largest(self, value: int) -> int:
        """The largest of the ranks' numbers."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def total(self, value: int) -> int:
        """The sum of the ranks' numbers."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def wait(self) -> None:
        """Until every rank is here."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def _reduce(self, value: int, operation: Any) -> int:
        if self.group is None:
            return value
        number = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(number, operation, group=self.group)
        return int(number)
