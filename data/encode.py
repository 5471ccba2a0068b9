"""Documents to token ids, by several threads. Order and ids do not depend on how many there are."""

import collections
import contextlib
import itertools
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bosch.data.ahead import map_ahead
from bosch.data.sources.source import Block, Source
from bosch.data.tokenizer_files import TokenizerText
from bosch.run.errors import UserError

# Encoding takes about a hundred times a text's memory, so no more than this is encoded at once. It
# decides the ids of longer documents, so a change of it is a change of pack.VERSION.
PIECE_CHARS = 1 << 21
CHUNK_CHARS = 1 << 18  # text encoded as one task, at least
CHUNK_BLOCKS = 4096  # at most
IDS_PER_CHAR = 4  # what an id counts where text is counted in characters


@dataclass(frozen=True)
class Position:
    """Where in a source to go on: documents read, and of the next one pieces read."""

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
    """A chunk's tokens, piece behind piece, each document with its begin and end token."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]  # of the pieces; 0: a document without text
    begins: NDArray[np.bool_]
    ends: NDArray[np.bool_]
    after: Position


def read_chunks(
    source: Source, start: Position, chunk_chars: int = CHUNK_CHARS, piece_chars: int = PIECE_CHARS
) -> Iterator[Chunk]:
    """A source in chunks, cut without regard to who will encode them."""
    blocks: list[Block] = []
    begins: list[bool] = []
    ends: list[bool] = []
    num_chars = 0
    for number, document in enumerate(source.read(start.document), start=start.document):
        for piece, (block, is_last) in enumerate(cut_document(document, piece_chars)):
            if number == start.document and piece < start.piece:
                continue
            blocks.append(block)
            begins.append(piece == 0)
            ends.append(is_last)
            num_chars += len(block) * (1 if isinstance(block, str) else IDS_PER_CHAR)
            if num_chars >= chunk_chars or len(blocks) >= CHUNK_BLOCKS:
                after = Position(number + 1) if is_last else Position(number, piece + 1)
                yield Chunk(blocks, begins, ends, after)
                blocks, begins, ends, num_chars = [], [], [], 0
    if blocks:
        yield Chunk(blocks, begins, ends, Position(number + 1))


def cut_document(
    document: Iterable[Block], piece_chars: int = PIECE_CHARS
) -> Iterator[tuple[Block, bool]]:
    """(piece, whether it is the last) of a document, however the source had divided it."""
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
    """Where to cut a text that is longer than the limit: behind the last line end in the limit's
    second half that no blank follows (no tokenizer we know joins characters across it), else any
    line end, else before a blank, else anywhere."""
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
    """Encodes chunks, one after the other."""

    def __init__(self, tokenizer: TokenizerText, source_tokenizer: TokenizerText | None):
        self.tokenizer = tokenizer
        self._model = tokenizer.load()
        self._source = source_tokenizer.load() if source_tokenizer else None

    def encode(self, chunk: Chunk) -> Encoded:
        texts = self._texts(chunk.blocks)
        pieces = [[piece for piece, _ in cut_document((text,))] for text in texts]
        encodings = iter(
            self._model.encode_batch_fast(list(itertools.chain(*pieces)), add_special_tokens=False)
        )
        begin = [] if self.tokenizer.begin_id is None else [self.tokenizer.begin_id]
        end = [] if self.tokenizer.end_id is None else [self.tokenizer.end_id]
        parts: list[list[int]] = []
        lengths = np.zeros(len(texts), np.int64)
        for number, text_pieces in enumerate(pieces):
            ids = [next(encodings).ids for _ in text_pieces]
            begins, ends = chunk.begins[number], chunk.ends[number]
            if begins and ends and not any(ids):
                continue
            document = [begin if begins else [], *ids, end if ends else []]
            lengths[number] = sum(map(len, document))
            parts += document
        flat = itertools.chain.from_iterable(parts)
        ids_array = np.fromiter(flat, self.tokenizer.dtype, int(lengths.sum()))
        return Encoded(
            ids_array, lengths, np.array(chunk.begins), np.array(chunk.ends), chunk.after
        )

    def _texts(self, blocks: Sequence[Block]) -> list[str]:
        """The blocks as text. Ids of another tokenizer are decoded, its special tokens left out."""
        texts = [block for block in blocks if isinstance(block, str)]
        if len(texts) == len(blocks):
            return texts
        assert self._source is not None, "a source of ids names their tokenizer"
        return decode_documents(self._source, [b for b in blocks if not isinstance(b, str)])


def decode_documents(tokenizer: Tokenizer, documents: Sequence[NDArray[np.uint32]]) -> list[str]:
    """Text of ids. What is left of a character at the ends of a cut document is taken off."""
    largest = max((int(ids.max()) for ids in documents if len(ids)), default=0)
    if tokenizer.id_to_token(largest) is None:
        raise UserError(
            f"The source holds the id {largest}, which the tokenizer named for it does not have: "
            "it is another's. Name the right one (?tokenizer=...)."
        )
    texts = tokenizer.decode_batch([ids.tolist() for ids in documents], skip_special_tokens=True)
    return [text.strip("\ufffd") for text in texts]


def share_reproduced(tokenizer: Tokenizer, documents: Sequence[NDArray[np.uint32]]) -> float:
    """How many of the pairs of neighboring ids come back when the documents' text is encoded again.
    Nearly all, if the tokenizer made them (a document cut at a length may differ at its ends); ids
    of another one decode to a jumble that is cut up otherwise."""
    special = {
        number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }
    same = total = 0
    for ids, text in zip(documents, decode_documents(tokenizer, documents), strict=True):
        told = [number for number in ids.tolist() if number not in special]
        again = tokenizer.encode(text, add_special_tokens=False).ids
        before, after = (collections.Counter(itertools.pairwise(ids)) for ids in (told, again))
        same += (before & after).total()
        total += max(before.total(), after.total())
    return same / max(1, total)


def encode_in_order(
    chunks: Iterable[Chunk],
    tokenizer: TokenizerText,
    source_tokenizer: TokenizerText | None,
    workers: int,
) -> Generator[Encoded, None, None]:
    """The chunks, encoded by that many threads, in their order. Few are in memory at a time.

    Threads are enough: tokenizers lets go of Python's lock while it encodes, 95 % of the time."""
    own = threading.local()  # a tokenizer for each thread: its cache is not made to be shared

    def load() -> None:
        own.encoder = Encoder(tokenizer, source_tokenizer)

    def encode(chunk: Chunk) -> Encoded:
        encoded: Encoded = own.encoder.encode(chunk)
        return encoded

    with one_thread_a_call():
        yield from map_ahead(encode, chunks, workers, 2 * workers, load)


@contextlib.contextmanager
def one_thread_a_call() -> Iterator[None]:
    """Without the threads inside tokenizers, which cost a quarter more and heed no --workers."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
