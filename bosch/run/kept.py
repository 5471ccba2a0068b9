"""Files that are read once in a command, though many of its steps ask for their text.

In a Python program a file may be edited between two calls, so each of them begins with `forget`."""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T", bound=Callable[..., object])
_clear = list[Callable[[], None]]()


def kept(read: T) -> T:
    """A function that reads files, as one that remembers what it found."""
    remembering = lru_cache(maxsize=32)(read)  # the lengths of a plan, twice
    _clear.append(remembering.cache_clear)
    return remembering  # type: ignore[return-value]  # it is called in the same way


def forget() -> None:
    for clear in _clear:
        clear()
