"""What a source is: documents that can be read from any number on, so that a killed run goes on
where it was. They are text, or ids of a tokenizer the source names; ids are always decoded and
encoded again, never used as they are."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bosch.plugins import suggest
from bosch.run.errors import UserError

Block = str | NDArray[np.uint32]  # text, or token ids of the source's own tokenizer
Document = Iterable[Block]  # a long text comes in several blocks: none has to be in memory whole


class Source(Protocol):
    """What packing needs of a source."""

    name: str  # as the user wrote it
    endless: bool  # whether there are documents without end, so that a budget is needed
    tokenizer: str | None  # whose ids the documents hold; None where they are text

    def facts(self) -> dict[str, Any]:
        """What decides the documents: the content of files, or a dataset and its revision."""
        ...

    def read(self, start: int) -> Iterator[Document]:
        """From number `start` on, always the same. Each is read before the next."""
        ...


@dataclass(frozen=True)
class WeightedSource:
    source: Source
    weight: float  # share of the tokens, relative to the other sources


def write_address(address: str, options: dict[str, str | None]) -> str:
    """How a source is written, with those options that are not None."""
    told = "&".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return f"{address}?{told}" if told else address


def take_field(row: dict[str, Any], field: str, where: str, tokenizer: str | None) -> Block:
    """The text of a row, or its token ids where the source names the tokenizer they belong to."""
    if field not in row:
        raise UserError(
            f"{where} has no field {field!r}: {suggest(field, [str(key) for key in row])}"
        )
    value = row[field]
    if isinstance(value, str):
        if tokenizer is not None:
            raise UserError(
                f"{where}: {field!r} is text, so tokenizer={tokenizer} has no meaning; leave it "
                "out."
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can spell such halves, no tokenizer takes them
            raise UserError(
                f"{where}: character {error.start:,} of {field!r} is half of a surrogate pair "
                f"({value[error.start]!a}), which is no text. Repair the row, or leave it out."
            ) from error
        return value
    # numpy's arrays come from parquet, plain lists from JSON
    if isinstance(value, list | np.ndarray) and all(
        isinstance(item, int | np.integer) for item in value[:100]
    ):
        if tokenizer is None:
            raise UserError(
                f"{where}: {field!r} holds numbers, as if they were token ids. Whose they are "
                "cannot be seen, and a model trains on foreign ids without an error: name their "
                "tokenizer (?tokenizer=...) and they are decoded."
            )
        try:
            return np.asarray(value, dtype=np.uint32)
        except (OverflowError, TypeError, ValueError) as error:
            raise UserError(
                f"{where}: {field!r} holds what is no token id ({error}); ids are whole numbers "
                "from 0 on."
            ) from error
    found = "null" if value is None else f"a {type(value).__name__}"
    raise UserError(
        f"{where}: {field!r} is {found}; a text is needed. Repair the row, or leave it out."
    )
