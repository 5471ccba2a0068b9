"""An ordered map over threads, for encoding documents and reading batches ahead of their use."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def map_in_threads(
    function: Callable[[In], Out], items: Iterable[In], num_threads: int, num_ahead: int
) -> Generator[Out, None, None]:
    """function(item) for each item, in order, computed up to `num_ahead` items early. An error is
    raised at its item."""
    pending: deque[Future[Out]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > num_ahead:
                    yield pending.popleft().result()
            yield from (future.result() for future in pending)
        finally:
            pool.shutdown(cancel_futures=True)
