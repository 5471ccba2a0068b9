"""Where training text comes from. A source is written as one line of text:

    toy                                  the embedded toy world: no files, any number of tokens
    corpus/                              a folder or file: .txt .md .jsonl .json .parquet .gz .zst
    hf:allenai/c4?config=en&field=text   a Hugging Face dataset; also split, revision, streaming=no
    mds:folder?tokenizer=NAME            MDS shards of token ids (data/sources/mds.py)
    prolong-64k/book-65536               one domain of ProLong (data/sources/prolong.py), downloaded
    prolong-512k/arxiv                   as far as the budget needs

and a list of them with `@weight` behind each is a mix: `corpus/@0.7 toy@0.3`. `prolong-64k` alone
is ProLong's own mix.

A source reads documents from any number on, so that a killed run goes on where it was. Documents
are text, or ids of a tokenizer the source names; ids are always decoded and encoded again, never
used as they are."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from bosch.plugins import suggest

Block = str | NDArray[np.uint32]  # text, or token ids of the source's own tokenizer
Document = Iterable[
    Block
]  # a long text comes in several blocks, so that none has to be in memory whole

TRUE, FALSE = ("yes", "true", "1"), ("no", "false", "0")


class Source(Protocol):
    """What packing needs of a source."""

    @property
    def name(self) -> str:
        """As the user wrote it."""
        ...

    @property
    def endless(self) -> bool:
        """Whether there are documents without end, so that a budget is needed."""
        ...

    @property
    def tokenizer(self) -> str | None:
        """Whose ids the documents hold; None where they are text."""
        ...

    def facts(self) -> dict[str, Any]:
        """What decides the documents, for fingerprints: the content of files, or a dataset and its
        revision."""
        ...

    def read(self, start: int) -> Iterator[Document]:
        """The documents from number `start` on, always the same, in the same order. Each is read
        before the next."""
        ...


@dataclass(frozen=True)
class WeightedSource:
    source: Source
    weight: float  # share of the tokens, relative to the other sources


def open_sources(texts: Sequence[str], seed: int, tokens: int | None) -> tuple[WeightedSource, ...]:
    """The sources of a mix. `seed` is the toy world's; `tokens` the budget: ProLong downloads what
    it needs for that."""
    from data.sources.prolong import expand_mix

    texts = [part for text in texts for part in expand_mix(text)]
    if not texts:
        raise ValueError("There is no source of text; name one, for example --sources toy.")
    split = [split_weight(text) for text in texts]
    weighted = [text for text, weight in zip(texts, split, strict=True) if weight[1] is not None]
    if weighted and len(weighted) < len(texts):
        bare = next(text for text, (_, weight) in zip(texts, split, strict=True) if weight is None)
        raise ValueError(
            f"{bare} has no weight, though {weighted[0]} has one: write @weight behind every "
            "source of a mix."
        )
    names = [name for name, _ in split]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{name} is in the mix twice; name each source once, with its whole weight."
            )
    weights = [1.0 if weight is None else weight for _, weight in split]
    return tuple(
        WeightedSource(
            open_source(
                name, seed, None if tokens is None else round(tokens * weight / sum(weights))
            ),
            weight,
        )
        for name, weight in zip(names, weights, strict=True)
    )


def open_source(text: str, seed: int, tokens: int | None = None) -> Source:
    """One source, without a weight. Files are opened when it is read, but what is named must be
    there."""
    from data.sources.files import FileSource
    from data.sources.hub import HubSource
    from data.sources.mds import MdsSource
    from data.sources.prolong import REPOSITORIES, open_prolong
    from data.toy_world.documents import ToyDocuments

    address, _, query = text.partition("?")
    kind, _, rest = address.partition(":")
    if address == "toy":
        read_options(text, query, ())
        return ToyDocuments(seed)
    if kind == "hf":
        options = read_options(
            text, query, ("config", "split", "field", "revision", "streaming", "tokenizer")
        )
        streaming = read_switch(text, "streaming", options.pop("streaming", "yes"))
        return HubSource(rest, streaming=streaming, **options)
    if kind == "mds":
        return MdsSource(Path(rest), **read_options(text, query, ("tokenizer", "column")))
    if address.partition("/")[0] in REPOSITORIES:
        return open_prolong(address, tokens, **read_options(text, query, ("tokenizer", "folder")))
    options = read_options(text, query, ("field", "tokenizer"))
    if not Path(address).exists():
        hint = (
            ""
            if "/" in address
            else f" It is no name of a source either: {suggest(address, ['toy', *REPOSITORIES])}"
        )
        raise FileNotFoundError(
            f"{address}: no such file or folder.{hint} Write hf:{address} for a Hugging Face "
            "dataset."
        )
    return FileSource(Path(address), **options)


def split_weight(text: str) -> tuple[str, float | None]:
    """`corpus/@0.3` -> (`corpus/`, 0.3)."""
    match = re.fullmatch(r"(.+)@([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)", text)
    if not match:
        return text, None
    weight = float(match[2])
    if weight <= 0:
        raise ValueError(
            f"{text}: the weight of a source must be above 0; leave the source out instead."
        )
    return match[1], weight


def read_options(text: str, query: str, known: tuple[str, ...]) -> dict[str, Any]:
    """What stands behind the question mark: `field=content&split=train`."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    for option in options:
        if option not in known:
            raise ValueError(
                f"{text}: this source has no option {option!r}; {suggest(option, known)}"
            )
    return options


def write_address(address: str, options: dict[str, str | None]) -> str:
    """The other way round: an address with those options that are not None."""
    told = "&".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return f"{address}?{told}" if told else address


def read_switch(text: str, name: str, value: str) -> bool:
    if value.lower() not in TRUE + FALSE:
        raise ValueError(f"{text}: {name} is {value!r}; write {name}=yes or {name}=no.")
    return value.lower() in TRUE


def take_field(row: dict[str, Any], field: str, where: str, tokenizer: str | None) -> Block:
    """The text of a row, or its token ids where the source names the tokenizer they belong to."""
    if field not in row:
        raise ValueError(
            f"{where} has no field {field!r}: {suggest(field, [str(key) for key in row])}"
        )
    value = row[field]
    if isinstance(value, str):
        if tokenizer is not None:
            raise ValueError(
                f"{where}: {field!r} is text, so tokenizer={tokenizer} has no meaning; leave it "
                "out."
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can spell such halves, no tokenizer takes them
            raise ValueError(
                f"{where}: character {error.start:,} of {field!r} is half of a surrogate pair "
                f"({value[error.start]!a}), which is no text. Repair the row, or leave it out."
            ) from error
        return value
    # numpy's arrays come from parquet, plain lists from JSON
    if isinstance(value, list | np.ndarray) and all(
        isinstance(item, int | np.integer) for item in value[:100]
    ):
        if tokenizer is None:
            raise ValueError(
                f"{where}: {field!r} holds numbers, as if they were token ids. Whose they are "
                "cannot be seen, and a model "
                "trains on foreign ids without an error: name their tokenizer (?tokenizer=...) and "
                "they are decoded."
            )
        try:
            return np.asarray(value, dtype=np.uint32)
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: {field!r} holds what is no token id ({error}); ids are whole numbers "
                "from 0 on."
            ) from error
    found = "null" if value is None else f"a {type(value).__name__}"
    raise ValueError(
        f"{where}: {field!r} is {found}; a text is needed. Repair the row, or leave it out."
    )
