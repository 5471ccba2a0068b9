"""Packs documents into sequences of tokens, which are written once and read by every training run.

A killed packing resumes at its last shard. Neither kills nor the number of workers change a byte.
data/token_files.py describes the files."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from bosch.config import NO_OPTION, PackingConfig, at_least
from bosch.data import encode, token_files
from bosch.data.encode import Chunk, Position, encode_in_order, share_reproduced
from bosch.data.sources.files import FileSource
from bosch.data.sources.source import Source
from bosch.data.token_files import DOC_ENDS, HELD_OUT, PROGRESS, SUMMARY, TOKENS, GrowingFiles
from bosch.data.tokenizer_files import TokenizerText, read_source_tokenizer
from bosch.run.errors import UserError
from bosch.run.files import read_sealed_json, write_sealed_json
from bosch.run.fingerprint import fingerprint, plain, speed_only
from bosch.run.memory import usable_cores
from bosch.run.progress import Bar, say, track

VERSION = 1  # raise it when the same settings give other bytes

DOCUMENTS_SHOWN = 3
DOCUMENTS_CHECKED = 20
SHOWN_CHARS = 120
LEAST_REPRODUCED = 0.98


@dataclass(frozen=True)
class PackConfig(PackingConfig):
    """How documents become sequences. A document longer than a sequence is split over several.
    Sequences are shuffled, so the parts of a book do not follow each other."""

    epochs: int = 1  # shuffled orders of the sequences to store; training stops after the last
    seed: int = 0  # of all random choices
    # Chunks of a quarter megabyte between the points from which a killed run can resume.
    shard_chunks: Annotated[int, NO_OPTION] = speed_only(256)
    # Size of a chunk. Changes how many tokens count as dropped at the budget, but not the tokens.
    chunk_chars: Annotated[int, NO_OPTION] = encode.CHUNK_CHARS

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "", "epochs", "shard_chunks", "chunk_chars")
        at_least(0, self, "", "seed")

    @property
    def needed_tokens(self) -> int | None:
        """Of all sources together; None: all that they have."""
        held_out = self.held_out_sequences * self.sequence_length
        return None if self.tokens is None else self.tokens + held_out

    def deciding(self) -> dict[str, object]:
        """What decides the tokens."""
        settings: dict[str, object] = plain(self)
        if not self.repeats:  # as before there were any: tokens of earlier commits are reused
            del settings["repeats"]
        if not self.has_blocks:
            del settings["repeat_block"]
        return settings

    @property
    def has_blocks(self) -> bool:
        """A sequence has room for two blocks of repeated passages."""
        block = self.repeat_block
        return bool(self.repeats and block and self.sequence_length >= 2 * block)


@dataclass
class Counts:
    """What became of a source's tokens: read = kept + held_out + every kind of dropped."""

    documents: int = 0
    tokens_read: int = 0
    tokens_kept: int = 0
    tokens_held_out: int = 0
    # The rest of the document in which the held-out slice ends, at most one sequence.
    dropped_behind_held_out: int = 0
    dropped_at_budget: int = 0  # the rest of the chunk in which the budget was met
    dropped_in_tail: int = 0  # less than a sequence, at the end
    documents_too_short: int = 0
    dropped_too_short: int = 0
    documents_empty: int = 0  # without text; also rows of a hub dataset without the field


@dataclass
class Progress:
    """All that a killed run needs to resume."""

    facts: str  # fingerprint of what determines the bytes
    commits: dict[str, str]  # at which sources on the hub are read
    counts: list[Counts]
    source: int = 0
    position: Position = field(default_factory=Position)
    gap_left: int = 0  # tokens still to be dropped after the held-out slice
    files: list[tuple[int, str]] = field(default_factory=list)  # their sizes and checksums


def pack_documents(
    sources: Sequence[Source], tokenizer: TokenizerText, config: PackConfig, folder: Path
) -> None:
    """Write the folder's files. A killed packing resumes, from its very end too: what is written
    last is then written again."""
    quotas = split_quotas(sources, config)
    path = folder / PROGRESS
    begun = read_sealed_json(path, "files") if path.exists() else {}
    # A source on the hub is read to the end at one commit: that of an earlier try, else the newest.
    # A stage of days would otherwise mix two versions, if its author pushed one in between.
    known, commits = begun.get("commits", {}), {}
    for source in sources:
        if not source.is_local:
            if source.name in known:
                source.pin(known[source.name])
            commits[source.name] = str(source.commit)
    facts = {  # everything that determines the bytes
        "version": VERSION,
        "config": config.deciding(),
        "tokenizer": tokenizer.hash,
        "sources": [{"weight": source.weight} | source.facts() for source in sources],
    }
    progress = Progress(fingerprint(facts), commits, [Counts() for _ in sources])
    if begun:
        if begun["facts"] != progress.facts:
            problem = f"{folder} was begun with other settings, another tokenizer or other sources"
            raise UserError(f"{problem}; use an empty folder, or what it was begun with.")
        begun["position"] = Position(**begun["position"])
        begun["counts"] = [Counts(**counts) for counts in begun["counts"]]
        progress = Progress(**begun)
    done = sum(counts.tokens_kept for counts in progress.counts)
    total = sum(train or 0 for _, train in quotas)
    with (
        contextlib.closing(GrowingFiles(folder, tokenizer.dtype.itemsize, progress.files)) as files,
        track("tokens", total=total, unit="tokens", done=done) as bar,
    ):
        packing = Packing(tokenizer, config, files, progress, bar)
        while (number := progress.source) < len(sources):
            packing.pack_source(sources[number], *quotas[number])
        packing.finish(facts)


def split_quotas(sources: Sequence[Source], config: PackConfig) -> list[tuple[int, int | None]]:
    """(held-out tokens, training tokens) of each source; the sums are exact. None: all it has."""
    weights = [source.weight for source in sources]
    held_out = share_out(config.held_out_sequences * config.sequence_length, weights)
    if config.tokens is not None:
        tokens = config.tokens // config.sequence_length * config.sequence_length
        return list(zip(held_out, share_out(tokens, weights), strict=True))
    if len(set(weights)) > 1:
        raise UserError("A mix with weights needs a budget: give --tokens, or no weights.")
    for source in sources:
        if source.endless:
            raise UserError(f"The source {source.name} never ends; give a budget with --tokens.")
    return [(tokens, None) for tokens in held_out]


def share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Whole shares that add up to the total: rounded down, plus one for those that lost most."""
    # Not each share rounded by itself: 10 in three equal parts would be 3 + 3 + 3.
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_loss = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_loss[: total - sum(shares)]:
        shares[i] += 1
    return shares


@dataclass(frozen=True)
class Packing:
    tokenizer: TokenizerText
    config: PackConfig
    files: GrowingFiles
    progress: Progress
    bar: Bar

    def pack_source(self, source: Source, held_out: int, train: int | None) -> None:
        """Pack a source from the position reached until it ends or its quota is met."""
        progress, counts = self.progress, self.progress.counts[self.progress.source]
        source_tokenizer = read_source_tokenizer(source.tokenizer) if source.tokenizer else None
        if progress.position == Position():  # not again where a killed packing goes on
            show_documents(source, source_tokenizer)
        chunk_chars = self.config.chunk_chars
        if train is not None:
            # Threads are some chunks ahead: of a short text they would read many times what it has.
            chunk_chars = min(chunk_chars, encode.CHARS_PER_ID * (held_out + train))
        chunks = encode.read_chunks(source, progress.position, chunk_chars)
        workers = self.config.workers or usable_cores()
        encoded = encode_in_order(chunks, self.tokenizer, source_tokenizer, workers)
        # Closed, because the threads are still some chunks ahead when the quota is met.
        with contextlib.closing(encoded):
            for number, chunk in enumerate(encoded, start=1):
                before = counts.tokens_kept
                is_met = self.place_tokens(chunk, held_out, train)
                progress.position = chunk.after
                self.bar.advance(counts.tokens_kept - before, documents=counts.documents)
                if is_met:
                    break
                if number % self.config.shard_chunks == 0:
                    self.end_shard()
        empty = f" ({counts.documents_empty:,} empty)" if counts.documents_empty else ""
        if counts.tokens_held_out < held_out or counts.tokens_kept < (train or 0):
            raise UserError(
                f"{source.name} has {counts.tokens_held_out + counts.tokens_kept:,} tokens in "
                f"{counts.documents:,} documents{empty}, but {held_out + (train or 0):,} are "
                f"needed of it ({held_out:,} of them held out). Use fewer (--tokens; in "
                "`bosch recover` --data.tokens), lower its weight, or hold out less "
                "(--held-out-sequences, --data.held-out-sequences). To train on them more than "
                "once, pack them by --epochs N of `bosch tokens` and use that folder "
                "(`bosch recover --data.tokens-from FOLDER`)."
            )
        if empty:
            say(f"{source.name}: {counts.documents:,} documents{empty}")
        if isinstance(source, FileSource):
            reached = progress.position.document + (progress.position.piece > 0)
            used = [file for file, first in source.first_documents.items() if first < reached]
            if len(used) < len(source.files):
                say(
                    f"{source.name}: {len(used):,} of {len(source.files):,} files read, up to "
                    f"{used[-1]}; later files are not trained on. To use all of them, name files "
                    "or folders as sources with weights (a.jsonl@0.5 b/@0.5)"
                )
        progress.source += 1
        progress.position, progress.gap_left = Position(), 0
        self.end_shard()

    def end_shard(self) -> None:
        # First the tokens, then what says how many there are: after a kill in between, the tokens
        # behind the last record are cut off and made again.
        self.progress.files = self.files.end_shard()
        write_sealed_json(self.files.folder / PROGRESS, asdict(self.progress))

    def place_tokens(self, chunk: Chunk, held_out: int, train: int | None) -> bool:
        """Cut the next tokens of a source: the first are held out, then comes a gap, then training
        tokens up to the quota. The gap is the rest of the document in which the held-out slice
        ends, at most a sequence. True if the quota is met."""
        # document 1    document 2               document 3
        # --------------|--------------------------|---------------------------|------
        # held out ............... | gap           | training tokens .................
        #
        # Any of the borders may lie in this chunk, in an earlier or in a later one. Without a gap
        # the end of a held-out document would be trained on, and the loss on its beginning would
        # look better than it is.
        progress, counts = self.progress, self.progress.counts[self.progress.source]
        # Without documents that are too short. One in several pieces is never too short.
        ends = np.array(chunk.ends)
        whole = np.array(chunk.begins) & ends
        empty = whole & (chunk.lengths == 0)
        short = whole & ~empty & (chunk.lengths < self.config.min_document_tokens)
        counts.documents += int(ends.sum())
        counts.tokens_read += len(chunk.ids)
        counts.documents_empty += int(empty.sum())
        counts.documents_too_short += int(short.sum())
        counts.dropped_too_short += int(chunk.lengths[short].sum())
        ids = chunk.ids[np.repeat(~short, chunk.lengths)]
        lengths = np.where(short, 0, chunk.lengths)
        document_ends = np.cumsum(lengths)[ends & (lengths > 0)]

        gap = min(held_out - counts.tokens_held_out, len(ids))  # where the held-out tokens end
        counts.tokens_held_out += gap
        if gap and counts.tokens_held_out == held_out:
            progress.gap_left = self.config.sequence_length
        # The gap ends with its document, with the sequence's length, or not in this chunk.
        rest = document_ends[document_ends >= gap]
        begin = int(min([gap + progress.gap_left, *rest[:1], len(ids)]))
        counts.dropped_behind_held_out += begin - gap
        progress.gap_left = 0 if len(rest) else progress.gap_left - (begin - gap)
        end = len(ids) if train is None else min(begin + train - counts.tokens_kept, len(ids))
        counts.tokens_kept += end - begin
        for name, first, last in ((HELD_OUT, 0, gap), (TOKENS, begin, end)):
            inside = document_ends[(document_ends > first) & (document_ends <= last)]
            self.files.append(name, ids[first:last], inside - first)
        is_met = counts.tokens_held_out == held_out and counts.tokens_kept == train
        if is_met:
            counts.dropped_at_budget = len(ids) - end
        return is_met

    def finish(self, facts: dict[str, Any]) -> None:
        """Write the files that are known only at the end."""
        config, files, progress, folder = self.config, self.files, self.progress, self.files.folder
        num_tokens = sum(counts.tokens_kept for counts in progress.counts)
        num_sequences, tail = divmod(num_tokens, config.sequence_length)
        if num_sequences == 0:
            raise UserError(
                f"The sources have {num_tokens:,} tokens, less than one sequence of "
                f"{config.sequence_length:,}. Add text, or use a shorter --sequence-length."
            )
        # The tail is taken from the last sources, in whose tokens it lies; a source that ends with
        # fewer than a sequence gives all it has, and the one before the rest.
        rest = tail
        for counts in reversed(progress.counts):
            taken = min(rest, counts.tokens_kept)
            counts.dropped_in_tail += taken
            counts.tokens_kept -= taken
            rest -= taken
        files.cut_tokens(num_tokens - tail)
        self.end_shard()
        files.truncate()
        held_out = [counts.tokens_held_out for counts in progress.counts]
        files.write_ends(TOKENS, DOC_ENDS, [counts.tokens_kept for counts in progress.counts])
        files.write_ends(HELD_OUT, token_files.HELD_OUT_DOC_ENDS, held_out)
        # An order of its own for each epoch: the first ones stay as they are with more of them.
        seeds = ([config.seed, epoch] for epoch in range(config.epochs))
        order = [np.random.default_rng(seed).permutation(num_sequences) for seed in seeds]
        token_files.write_array(folder / token_files.ORDER, np.array(order, "<u4"))
        described = zip(facts["sources"], progress.counts, strict=True)
        summary = {
            "fingerprint": progress.facts,
            "tokenizer_hash": self.tokenizer.hash,
            "num_ids": self.tokenizer.num_ids,
            "token_bytes": files.token_bytes,
            "seq_len": config.sequence_length,
            "num_sequences": num_sequences,
            "num_held_out_sequences": sum(held_out) // config.sequence_length,
            "epochs": config.epochs,
            **({"repeats": config.repeats} if config.repeats else {}),
            **({"repeat_block": config.repeat_block} if config.has_blocks else {}),
            "sources": [{"source": source} | asdict(counts) for source, counts in described],
            "commits": progress.commits,
            "facts": facts,
        }
        write_sealed_json(folder / SUMMARY, summary)
        say(
            f"tokens: {num_sequences:,} sequences of {config.sequence_length:,} "
            f"({num_tokens - tail:,} tokens), {tail:,} tokens in no sequence"
        )


def show_documents(source: Source, tokenizer: TokenizerText | None) -> None:
    """Print the start of the first documents. Refuse ids that are not the named tokenizer's."""
    documents = itertools.islice(source.read(0), DOCUMENTS_CHECKED)
    first = [next(iter(document), "") for document in documents]
    ids = [block for block in first if not isinstance(block, str)]
    texts = encode.as_texts(first, tokenizer.load() if tokenizer else None)
    if tokenizer and ids and (share := share_reproduced(tokenizer.load(), ids)) < LEAST_REPRODUCED:
        raise UserError(
            f"The token ids of {source.name} are not those of {source.tokenizer}: decoded and "
            f"encoded again {share:.0%} stay the same; one document reads "
            f"{texts[0][:SHOWN_CHARS]!r}. Name the tokenizer that made them (?tokenizer=...)."
        )
    for number, text in enumerate(texts[:DOCUMENTS_SHOWN], start=1):
        say(f"{source.name}, document {number}: {text[:SHOWN_CHARS]!r}")
