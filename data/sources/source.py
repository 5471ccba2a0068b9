"""What a source is: numbered documents that can be read from any number on, so that a killed run
resumes where it stopped. A document is text, or token ids of a tokenizer that the source names; ids
are always decoded and encoded again, never used as they are."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bosch.plugins import suggest
from bosch.run.errors import UserError

Block = str | NDArray[np.uint32]  # text, or token ids of the source's own tokenizer
Document = Iterable[Block]  # a long text comes in several blocks, so that it fits in memory

TEXT_FIELD = "text"  # of a row, where no other field is named


class Source(ABC):
    name: str  # as the user wrote it
    endless = False  # the documents never end, so a budget is needed
    tokenizer: str | None = None  # whose token ids the documents hold; None: they are text
    weight = 1.0  # share of the tokens, relative to the other sources
    is_local = True  # else it is read from the hub, at one commit

    @abstractmethod
    def facts(self) -> dict[str, object]:
        """What determines the documents: hashes of files, or a dataset and its revision."""

    @abstractmethod
    def read(self, start: int) -> Iterator[Document]:
        """The documents from number `start` on, the same every time. Read each one before asking
        for the next."""

    @property
    def commit(self) -> str | None:
        """The commit on the hub that is read: the newest, or without a network the one in the
        cache. None: the source is local."""
        return None

    def pin(self, commit: str) -> None:
        """Read this commit, even if there is a newer one."""
        assert not self.is_local, "a local source has no commits"


def write_address(address: str, options: dict[str, str | None]) -> str:
    """A source as the user writes it, with those options that are not None."""
    query = "&".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return f"{address}?{query}" if query else address


def take_field(row: dict[str, object], field: str, where: str, tokenizer: str | None) -> Block:
    """The text of a row, or its token ids if the source names their tokenizer."""
    if field not in row:
        raise UserError(f"{where} has no field {field!r}: {suggest(field, list(map(str, row)))}")
    value = row[field]
    # A look at the first hundred says what kind it is; `token_ids` looks at every one.
    is_ids = isinstance(value, list) and all(isinstance(item, int) for item in value[:100])
    if isinstance(value, str) and tokenizer is None:
        refuse_half_pair(value, f"{where}: {field!r}")
        return value
    if isinstance(value, list) and is_ids and tokenizer is not None:
        try:
            return token_ids(value)
        except (OverflowError, TypeError, ValueError) as error:
            problem = f"holds something that is not a token id ({error}); ids are whole numbers."
    elif is_ids:
        problem = "holds numbers, perhaps token ids: name their tokenizer (?tokenizer=...)."
    elif isinstance(value, str):
        problem = f"is text, so tokenizer={tokenizer} means nothing here; leave it out."
    else:
        kind = "null" if value is None else f"a {type(value).__name__}"
        problem = f"is {kind}, not text. Repair the row, or leave it out."
    raise UserError(f"{where}: {field!r} {problem}")


def token_ids(values: Sequence[Any]) -> np.ndarray:
    """ValueError if one is none: numpy itself would take 2.7 as 2, and "3" as 3."""
    found = np.asarray(values or np.zeros(0, np.uint32))
    if found.dtype.kind not in "iu":
        raise ValueError("not all are whole numbers")
    if len(found) and not 0 <= found.min() <= found.max() < 2**32:
        raise ValueError(f"from {found.min()} to {found.max()}")
    return found.astype(np.uint32)


def refuse_half_pair(text: str, where: str) -> None:
    """Refuse half of a surrogate pair, which JSON can spell and tokenizers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: character {error.start:,} is half of a surrogate pair "
            f"({text[error.start]!a}), no valid text. Repair it, or leave it out."
        ) from error


def first_line(error: BaseException) -> str:
    """What a library says in its error, without the lines of details under it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
