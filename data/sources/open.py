"""Opens sources of training text. Each is written as one line of text:

    toy                                  the embedded toy world: no files, any number of tokens
    corpus/                              a folder or file: .txt .md .jsonl .json .parquet .gz .zst
    hf:allenai/c4?config=en&field=text   a Hugging Face dataset; also split, revision, streaming=no
    prolong-64k/book-65536               one domain of ProLong (data/sources/mds.py); downloads only
    prolong-512k/arxiv                   as much as the budget needs

Several with `@weight` at the end of each are a mix: `corpus/@0.7 toy@0.3`. `prolong-64k` without a
domain is ProLong's own mix."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from bosch.data.sources.files import FileSource
from bosch.data.sources.hub import HubSource
from bosch.data.sources.mds import LLAMA_3, MIX_64K, REPOSITORIES, ProLongSource
from bosch.data.sources.source import TEXT_FIELD, Source
from bosch.data.toy_world.documents import ToyDocuments
from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, UserError

SWITCH = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def open_sources(texts: Sequence[str], seed: int, tokens: int | None) -> list[Source]:
    """The sources of a mix. `seed` is the toy world's; `tokens`, held-out ones
    included, limits what ProLong downloads."""
    parts = [part for text in texts for part in split_weight(text)]
    if not parts:
        raise UserError("There is no source of text; name one, such as --source toy.")
    names = [name for name, _ in parts]
    unweighted = [name for name, weight in parts if weight is None]
    if 0 < len(unweighted) < len(parts):
        weighted = next(f"{name}@{weight:g}" for name, weight in parts if weight is not None)
        raise UserError(f"{unweighted[0]} has no weight, but {weighted} has one: give all one.")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name} is in the mix twice; name it once, with its total weight.")
    weights = [1.0 if weight is None else weight for _, weight in parts]
    sources = []
    for name, weight in zip(names, weights, strict=True):
        # What a source is asked for at most, so that no more of it is downloaded.
        budget = None if tokens is None else round(tokens * weight / sum(weights))
        sources.append(open_source(name, seed, budget))
        sources[-1].weight = weight
    return sources


def split_weight(text: str) -> list[tuple[str, float | None]]:
    """`corpus/@0.3` -> (`corpus/`, 0.3). `prolong-64k`, with or without options and a weight,
    becomes its domains with weights."""
    # A number behind the last @, so that a folder may have an @ in its name.
    match = re.fullmatch(r"(.+)@([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)", text)
    name, weight = (match[1], float(match[2])) if match else (text, None)
    if weight is not None and not 0 < weight < math.inf:
        raise UserError(f"{text}: the weight of a source must be a number above 0.")
    # ProLong's own mix, whose shares are kept whatever weight it has among other sources.
    address, mark, query = name.partition("?")
    if address != "prolong-64k":
        return [(name, weight)]
    return [
        (f"{address}/{domain}{mark}{query}", float(f"{share * (weight or 1):g}"))
        for domain, share in MIX_64K.items()
    ]


def open_source(text: str, seed: int, tokens: int | None = None) -> Source:
    """One source, without a weight. It is read later, but a local file must exist now."""
    address, _, query = text.partition("?")
    options: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        options[name] = value

    def allow(*known: str) -> None:
        for option in options:
            if option not in known:
                raise UserError(f"{text} has no option {option!r}; {suggest(option, known)}")

    if address == "toy":
        allow()
        return ToyDocuments(seed)
    if address.startswith("hf:"):
        allow("config", "split", "field", "revision", "streaming", "tokenizer")
        if (streaming := options.get("streaming", "yes").lower()) not in SWITCH:
            raise UserError(f"{text}: write streaming=yes or streaming=no, not {streaming!r}.")
        return HubSource(
            address.removeprefix("hf:"),
            config=options.get("config"),
            split=options.get("split", HubSource.split),
            field=options.get("field", TEXT_FIELD),
            revision=options.get("revision"),
            streaming=SWITCH[streaming],
            tokenizer=options.get("tokenizer"),
        )
    if address.partition("/")[0] in REPOSITORIES:
        allow("tokenizer", "folder")
        return ProLongSource(
            address,
            tokens,
            tokenizer=options.get("tokenizer", LLAMA_3),
            folder=options.get("folder"),
        )
    allow("field", "tokenizer")
    if not Path(address).exists():
        nearest = suggest(address, ["toy", *REPOSITORIES])
        hint = "" if "/" in address else f", and no source of that name either: {nearest}"
        raise MissingFileError(
            f"{address}: no such file or folder{hint or '.'} A dataset on the hub: hf:{address}."
        )
    return FileSource(
        Path(address),
        field=options.get("field", TEXT_FIELD),
        tokenizer=options.get("tokenizer"),
    )
