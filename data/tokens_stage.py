"""The stage `tokens`: packs training text (data/pack.py), or reuses the tokens of another run."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path

from bosch.config import Config, PackingConfig, shared_fields
from bosch.data import text_tasks
from bosch.data.loader import check_reuse, read_summary
from bosch.data.pack import VERSION, PackConfig, pack_documents
from bosch.data.sources.files import COMPRESSED, LINES, TEXT, kind_of
from bosch.data.sources.open import open_sources
from bosch.data.sources.source import Source
from bosch.data.token_files import SUMMARY
from bosch.data.tokenizer_files import TokenizerText, read_source_tokenizer, read_tokenizer
from bosch.model import find_model, load_tokenizer
from bosch.run.dist import rank_and_world
from bosch.run.errors import UserError
from bosch.run.files import MANIFEST, read_sealed_json
from bosch.run.stage import Artifact, Stage, follow_reference

MOST_TO_COUNT = 5_000_000  # bytes of text whose tokens or words are counted beforehand


def check(config: Config) -> None:
    """Refuse, before any stage, what packing could not fetch after hours of search: the tokenizer
    of sources that hold token ids, and sources on the hub, which are asked for a small file."""
    needed = config.data.tokens + config.data.held_out_sequences * config.data.sequence_length
    sources = open_sources(config.data.source, config.seed, needed)
    for tokenizer in sorted({source.tokenizer for source in sources if source.tokenizer}):
        read_source_tokenizer(tokenizer)
    for source in sources:
        _ = source.commit  # asks the hub
    # Whether the budget can be met is known for sure only of one source of plain files.
    files = [file for source in sources[:1] for file in getattr(source, "files", [])]
    if len(sources) == 1 and files and all(kind_of(file) in TEXT + LINES for file in files):
        check_amount(config, sources[0], files)
    if config.data.answers and all(one.is_local and not one.tokenizer for one in sources):
        blocks, left = list[str](), MOST_TO_COUNT
        for block in map(str, chain.from_iterable(chain(*(one.read(0) for one in sources)))):
            blocks.append(block)
            left -= len(block)
            if left < 0:  # of much text all words are counted when it is packed
                return
        text = text_tasks.make_text(blocks)
        text_tasks.check_words(text, "The training text", text_tasks.WITHOUT_ANSWERS)


def check_amount(config: Config, source: Source, files: Sequence[Path]) -> None:
    """Refuse text of which there is too little. It is counted where that takes seconds."""
    length = config.data.sequence_length
    held_out = config.data.held_out_sequences * length
    needed = config.data.tokens // length * length + held_out
    num_bytes = sum(file.stat().st_size for file in files)
    if source.tokenizer or any(file.suffix.lower() in COMPRESSED for file in files):
        return
    # A token takes a byte or more, most of them three or four.
    if needed <= num_bytes and (num_bytes > MOST_TO_COUNT or not find_model(config.model)):
        return
    if needed <= num_bytes:
        tokenizer = load_tokenizer(config.model)
        texts = ["".join(map(str, document)) for document in source.read(0)]
        # An end token goes behind each document; one that begins a text is among its ids.
        lengths = [len(ids) + 1 for ids in tokenizer(list(filter(None, texts)))["input_ids"]]
        lengths = [n for n in lengths if n >= config.data.min_document_tokens]
        found, gap = sum(lengths), gap_behind(held_out, lengths, length)
        if found - gap >= needed:
            return
        amount, enough = f"about {found:,} tokens", found - gap
    else:
        amount, enough = f"{num_bytes:,} bytes of text", num_bytes // 5
    remedy = f"pass --data.tokens {enough - held_out}, or more text"
    if enough - held_out < length:
        remedy = "name more text"
    raise UserError(
        f"{source.name} has {amount}, too little for {config.data.tokens:,} tokens to train on and "
        f"{held_out:,} held out; {remedy}."
    )


def gap_behind(held_out: int, lengths: Sequence[int], most: int) -> int:
    """What is left of the document in which the held-out tokens end: at most so many of its tokens
    are not trained on (data/pack.py). `lengths`: of the documents, in their order."""
    ends = accumulate(lengths)
    return min(most, next((end - held_out for end in ends if end >= held_out > 0), 0))


def stage(
    model: str,
    sources: Sequence[str],
    packing: PackConfig,
    name: str = "tokens",
    shared: bool = False,
) -> Stage:
    """Packs these sources. The settings are known before anything is downloaded: they identify a
    source on the hub by its name and options; its commit is in the summary of the tokens."""

    def run(folder: Path) -> None:
        opened = open_sources(sources, packing.seed, packing.needed_tokens)
        pack_documents(opened, read_ending(model), packing, folder)

    return Stage(
        name,
        run=run,
        settings=partial(describe, model, sources, packing),
        version=VERSION,
        shared=shared,
    )


def describe(model: str, sources: Sequence[str], packing: PackConfig) -> dict[str, object]:
    """All that decides the tokens. UserError for sources that cannot be read or hold nothing that
    can be packed."""
    facts: list[dict[str, object]] = []
    for source in open_sources(sources, packing.seed, packing.needed_tokens):
        facts.append({"name": source.name, "weight": source.weight})
        if not source.is_local:
            continue
        facts[-1] |= source.facts()
        # The first block of the first document: a file of another kind than its suffix says.
        first = next(iter(next(iter(source.read(0)), ())), "")
        if isinstance(first, str) and "\0" in first[:1_000]:
            raise UserError(f"{source.name}: the first document holds NUL characters.")
        # A source without an end in which every document is too short would be read forever.
        if source.endless and packing.min_document_tokens:
            texts = ("".join(map(str, text)) for text in islice(source.read(0), 1_000))
            if max(len(text.encode()) for text in texts) < packing.min_document_tokens:
                raise UserError(  # a token is a byte or more
                    f"min_document_tokens is {packing.min_document_tokens:,}, and "
                    f"{source.name} has no documents so long; choose less."
                )
    # A model that is not here yet is known by its name: its tokenizer is not fetched for this.
    tokenizer = read_ending(model).hash if find_model(model) else model
    return {"tokenizer": tokenizer, "sources": facts, "packing": packing.deciding()}


def read_ending(model: str) -> TokenizerText:
    """A tokenizer with a token to put between documents."""
    text = read_tokenizer(model)
    if text.end_id is None:
        problem = f"The tokenizer of {model} names no end token, which goes between documents"
        raise UserError(f"{problem}. Add eos_token to its tokenizer_config.json.")
    return text


def stage_or_reused(config: Config) -> Stage | Artifact:
    """What a run trains on: packed by the stage, or the tokens that data.tokens_from names, if they
    are complete, of this model's tokenizer, of this length, and enough."""
    data = config.data
    if data.tokens_from is None:
        packing = PackConfig(**shared_fields(PackingConfig, data), seed=config.seed)
        packed = stage(config.model, data.source, packing, shared=True)
        return replace(packed, check=partial(check, config))
    folder, length = follow_reference(Path(data.tokens_from)), data.sequence_length
    tokenizer_hash = read_tokenizer(config.model).hash
    # Checksums of all tokens take minutes, so one rank reads them; all ranks check the rest.
    is_first = rank_and_world()[0] == 0
    check_reuse(folder, tokenizer_hash, length, data.tokens // length, verify=is_first)
    return Artifact(folder, read_sealed_json(folder / MANIFEST)["fingerprint"])


def with_all_of(folder: Path, config: Config) -> Config:
    """The config of a run on all tokens that a folder holds, in sequences of its length."""
    summary = read_sealed_json(follow_reference(folder) / SUMMARY)
    length = summary["seq_len"]
    data = replace(
        config.data,
        tokens_from=str(folder),
        sequence_length=length,
        tokens=length * summary["num_sequences"],
    )
    return replace(config, data=data)


def count(config: Config) -> int:
    """Tokens in the folder, of which a run may need fewer, or some again."""
    if config.data.tokens_from is None:
        return config.data.tokens
    folder = follow_reference(Path(config.data.tokens_from))
    summary = read_summary(folder, read_tokenizer(config.model).hash)
    return int(summary["num_sequences"] * summary["seq_len"])
