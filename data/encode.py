"""Encodes documents in several threads. Order and ids do not depend on the number of threads."""

import collections
import itertools
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bosch.data.sources.source import Block, Source
from bosch.data.threads import map_in_threads
from bosch.data.tokenizer_files import TokenizerText
from bosch.run.errors import UserError

# Encoding takes about a hundred times the memory of the text, so longer documents are encoded in
# pieces. The size determines their ids: whoever changes it must raise pack.VERSION.
PIECE_CHARS = 1 << 21
CHUNK_CHARS = 1 << 18  # a task of one thread is at least this much text,
CHUNK_BLOCKS = 4096  # or this many blocks
CHARS_PER_ID = 4  # a stored id counts as this many characters


@dataclass(frozen=True)
class Position:
    """Where in a source to resume: documents read, and pieces read of the next one."""

    document: int = 0
    piece: int = 0


@dataclass(frozen=True)
class Chunk:
    """Consecutive pieces of documents."""

    blocks: list[Block]
    begins: list[bool]  # whether a document begins with this piece
    ends: list[bool]
    after: Position


@dataclass(frozen=True)
class Encoded:
    """A chunk's tokens, one piece after another, each document with its begin and end token."""

    ids: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int64]  # tokens of each piece; 0: a document without text
    begins: NDArray[np.bool_]
    ends: NDArray[np.bool_]
    after: Position


def read_chunks(source: Source, start: Position, chunk_chars: int) -> Iterator[Chunk]:
    """A source in chunks, which do not depend on the number of threads that encode them."""
    blocks: list[Block] = []
    begins: list[bool] = []
    ends: list[bool] = []
    num_chars = 0
    for number, document in enumerate(source.read(start.document), start=start.document):
        for piece, (block, is_last) in enumerate(cut_document(document)):
            if number == start.document and piece < start.piece:
                continue
            blocks.append(block)
            begins.append(piece == 0)
            ends.append(is_last)
            num_chars += len(block) * (1 if isinstance(block, str) else CHARS_PER_ID)
            if num_chars >= chunk_chars or len(blocks) >= CHUNK_BLOCKS:
                after = Position(number + 1) if is_last else Position(number, piece + 1)
                yield Chunk(blocks, begins, ends, after)
                blocks, begins, ends, num_chars = [], [], [], 0
    if blocks:
        yield Chunk(blocks, begins, ends, Position(number + 1))


def cut_document(
    document: Iterable[Block], piece_chars: int | None = None
) -> Iterator[tuple[Block, bool]]:
    """(piece, whether it is the last) of a document. The pieces do not depend on its blocks."""
    piece_chars = piece_chars or PIECE_CHARS
    text = ""
    for block in document:
        if not isinstance(block, str):
            yield block, True
            return
        text += block
        while len(text) > piece_chars:
            cut = find_cut(text, piece_chars)
            yield text[:cut], False
            text = text[cut:]
    yield text, True


def find_cut(text: str, limit: int) -> int:
    """Where to cut a text that is longer than the limit: in the limit's second half, after the last
    line end that no blank follows (no tokenizer we know joins characters across it), else after any
    line end, else before a blank, else at the limit."""
    lowest = limit // 2
    end = text.rfind("\n", lowest, limit)
    any_line = end + 1
    while end >= 0:
        if not text[end + 1].isspace():
            return end + 1
        end = text.rfind("\n", lowest, end)
    blank = text.rfind(" ", lowest, limit)
    return any_line or (blank if blank > 0 else limit)


class Encoder:
    """Encodes chunks, one at a time."""

    def __init__(self, tokenizer: TokenizerText, source_tokenizer: TokenizerText | None):
        self._model = tokenizer.load()
        self._dtype = tokenizer.dtype
        self._begin, self._end = (
            [] if number is None else [number] for number in (tokenizer.begin_id, tokenizer.end_id)
        )
        self._source = source_tokenizer.load() if source_tokenizer else None

    def encode(self, chunk: Chunk) -> Encoded:
        texts = [block for block in chunk.blocks if isinstance(block, str)]
        if ids_of_source := [block for block in chunk.blocks if not isinstance(block, str)]:
            assert self._source is not None, "a source of ids names their tokenizer"
            texts = decode_documents(self._source, ids_of_source)
        pieces = [[piece for piece, _ in cut_document((text,))] for text in texts]
        flat = list(itertools.chain.from_iterable(pieces))
        encodings = iter(self._model.encode_batch_fast(flat, add_special_tokens=False))
        parts: list[list[int]] = []
        lengths = np.zeros(len(texts), np.int64)
        for number, (text_pieces, begins, ends) in enumerate(
            zip(pieces, chunk.begins, chunk.ends, strict=True)
        ):
            ids = [next(encodings).ids for _ in text_pieces]
            if begins and ends and not any(ids):
                continue
            document = [self._begin if begins else [], *ids, self._end if ends else []]
            lengths[number] = sum(map(len, document))
            parts += document
        all_ids = np.fromiter(itertools.chain.from_iterable(parts), self._dtype, int(lengths.sum()))
        return Encoded(all_ids, lengths, np.array(chunk.begins), np.array(chunk.ends), chunk.after)


def decode_documents(tokenizer: Tokenizer, documents: Sequence[NDArray[np.uint32]]) -> list[str]:
    """Text of ids. A part of a character at the ends of a document that was cut is removed."""
    largest = max((int(ids.max()) for ids in documents if len(ids)), default=0)
    if tokenizer.id_to_token(largest) is None:
        raise UserError(
            f"The source holds the id {largest}, which the tokenizer named for it does not have. "
            "Name the tokenizer that made the ids (?tokenizer=...)."
        )
    texts = tokenizer.decode_batch([ids.tolist() for ids in documents], skip_special_tokens=True)
    return [text.strip("\ufffd") for text in texts]


def share_reproduced(tokenizer: Tokenizer, documents: Sequence[NDArray[np.uint32]]) -> float:
    """The share of pairs of neighboring ids that come back when the documents are decoded and
    encoded again: nearly 1 if the tokenizer made them (a document that was cut may differ at its
    ends), far less if another one did."""
    special = {
        number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }
    same = total = 0
    for ids, text in zip(documents, decode_documents(tokenizer, documents), strict=True):
        stored = [number for number in ids.tolist() if number not in special]
        again = tokenizer.encode(text, add_special_tokens=False).ids
        before, after = (collections.Counter(itertools.pairwise(ids)) for ids in (stored, again))
        same += (before & after).total()
        total += max(before.total(), after.total())
    return same / max(1, total)


def encode_in_order(
    chunks: Iterable[Chunk],
    tokenizer: TokenizerText,
    source_tokenizer: TokenizerText | None,
    workers: int,
) -> Generator[Encoded, None, None]:
    """The chunks, encoded by `workers` threads, in order. Only a few are in memory at a time.

    Threads are enough: tokenizers releases Python's lock while it encodes, 95 % of the time."""
    thread = threading.local()  # a tokenizer for each thread: its cache is not made for sharing

    def load() -> None:
        thread.encoder = Encoder(tokenizer, source_tokenizer)

    def encode(chunk: Chunk) -> Encoded:
        encoded: Encoded = thread.encoder.encode(chunk)
        return encoded

    # The threads of tokenizers itself cost a quarter more and ignore --workers.
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield from map_in_threads(encode, chunks, workers, 2 * workers, load)
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
