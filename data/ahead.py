"""Work that threads do ahead of whoever asks for it: encoding documents, reading batches."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def map_ahead(
    function: Callable[[In], Out],
    items: Iterable[In],
    threads: int,
    ahead: int,
    prepare: Callable[[], None] | None = None,
) -> Generator[Out, None, None]:
    """function(item) for each item, in their order, up to `ahead` of them early. An error comes out
    at its item. `prepare` is called once in each thread."""
    pending: deque[Future[Out]] = deque()
    with ThreadPoolExecutor(threads, initializer=prepare) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
