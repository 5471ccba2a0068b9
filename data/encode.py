"""Encodes documents in several threads. Order and ids do not depend on the number of threads."""

import itertools
import os
import re
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bosch.data.loader import map_in_threads
from bosch.data.sources.source import Block, Source
from bosch.data.tokenizer_files import TokenizerText
from bosch.run.errors import UserError

# Encoding takes about a hundred times the memory of the text, so longer documents are encoded in
# pieces. The size determines their ids: whoever changes it must raise pack.VERSION.
PIECE_CHARS = 1 << 21
CHUNK_CHARS = 1 << 18  # a task of one thread is at least this much text,
CHUNK_BLOCKS = 4096  # or this many blocks
CHARS_PER_ID = 4  # a stored id counts as this many characters
LAST_LINE_END = re.compile(r".*\n(?=\S)", re.DOTALL)


@dataclass(frozen=True)
class Position:
    """Where in a source to resume: documents read, and pieces read of the next one."""

    document: int = 0
    piece: int = 0


@dataclass
class Chunk:
    """Consecutive pieces of documents, and once they are encoded their tokens: one piece after
    another, each document with its begin and end token."""

    blocks: list[Block]
    begins: list[bool]  # whether a document begins with this piece
    ends: list[bool]
    after: Position = Position()
    ids: NDArray[np.unsignedinteger] = field(init=False)
    lengths: NDArray[np.int64] = field(init=False)  # of each piece; 0: a document without text


def read_chunks(source: Source, start: Position, chunk_chars: int) -> Iterator[Chunk]:
    """A source in chunks, which do not depend on the number of threads that encode them."""
    # A chunk ends by the text in it and by nothing else: not by time, and not by how fast it is
    # encoded. So a resumed packing makes the same chunks, and places tokens in the same way.
    chunk, num_chars = Chunk([], [], []), 0
    for number, document in enumerate(source.read(start.document), start=start.document):
        for piece, (block, is_last) in enumerate(cut_document(document)):
            # A document is read from its start again: only whole documents have numbers.
            if number == start.document and piece < start.piece:
                continue
            chunk.blocks.append(block)
            chunk.begins.append(piece == 0)
            chunk.ends.append(is_last)
            chunk.after = Position(number + 1) if is_last else Position(number, piece + 1)
            num_chars += len(block) * (1 if isinstance(block, str) else CHARS_PER_ID)
            if num_chars >= chunk_chars or len(chunk.blocks) >= CHUNK_BLOCKS:
                yield chunk
                chunk, num_chars = Chunk([], [], []), 0
    if chunk.blocks:
        yield chunk


def cut_document(document: Iterable[Block]) -> Iterator[tuple[Block, bool]]:
    """(piece, whether it is the last) of a document. The pieces do not depend on its blocks."""
    text = ""
    for block in document:
        if not isinstance(block, str):
            yield block, True
            return
        # Where it is cut depends on the text alone, as if it had come in one block: the size of a
        # block is a matter of memory and must not change ids.
        text += block
        while len(text) > PIECE_CHARS:
            cut = find_cut(text, PIECE_CHARS)
            yield text[:cut], False
            text = text[cut:]
    yield text, True


def find_cut(text: str, limit: int) -> int:
    """Where to cut a text that is longer than the limit: in the limit's second half, after the last
    line end that no blank follows (no tokenizer we know joins characters across it), else after any
    line end, else before a blank, else at the limit."""
    lowest = limit // 2
    if match := LAST_LINE_END.match(text, lowest, limit + 1):
        return match.end()
    blank = text.rfind(" ", lowest, limit)
    return text.rfind("\n", lowest, limit) + 1 or (blank if blank > 0 else limit)


class Encoder:
    def __init__(self, tokenizer: TokenizerText, source_tokenizer: TokenizerText | None):
        self._model, self._dtype = tokenizer.load(), tokenizer.dtype
        ids = tokenizer.begin_id, tokenizer.end_id
        self._begin, self._end = ([] if number is None else [number] for number in ids)
        self._source = source_tokenizer.load() if source_tokenizer else None

    def encode(self, chunk: Chunk) -> Chunk:
        # Cut again: stored ids come here whole, and their text may be longer than a piece.
        pieces = [
            [piece for piece, _ in cut_document((text,))]
            for text in as_texts(chunk.blocks, self._source)
        ]
        # All pieces of the chunk in one call, and then taken apart again: a call has a price.
        flat = list(itertools.chain.from_iterable(pieces))
        encodings = iter(self._model.encode_batch_fast(flat, add_special_tokens=False))
        parts: list[list[int]] = []
        chunk.lengths = np.zeros(len(pieces), np.int64)
        flags = zip(pieces, chunk.begins, chunk.ends, strict=True)
        for number, (text_pieces, begins, ends) in enumerate(flags):
            ids = [next(encodings).ids for _ in text_pieces]
            # A document without text gets no begin and end token either: a model would learn that
            # one follows the other.
            if begins and ends and not any(ids):
                continue
            document = [self._begin if begins else [], *ids, self._end if ends else []]
            chunk.lengths[number] = sum(map(len, document))
            parts += document
        total = int(chunk.lengths.sum())
        chunk.ids = np.fromiter(itertools.chain.from_iterable(parts), self._dtype, total)
        return chunk


def as_texts(blocks: Sequence[Block], tokenizer: Tokenizer | None) -> list[str]:
    """The texts of blocks. Of stored ids a part of a character at their ends is removed."""
    ids = [block for block in blocks if not isinstance(block, str)]
    if not ids:
        return [str(block) for block in blocks]
    assert tokenizer is not None, "a source of ids names their tokenizer"
    largest = max((int(some.max()) for some in ids if len(some)), default=0)
    if tokenizer.id_to_token(largest) is None:
        problem = f"The source holds the id {largest}, which the tokenizer named for it has not"
        raise UserError(f"{problem}. Name the tokenizer that made the ids (?tokenizer=...).")
    texts = tokenizer.decode_batch([some.tolist() for some in ids], skip_special_tokens=True)
    # A sample of ids may begin or end within a character of several bytes, which decodes to this.
    return [text.strip("\ufffd") for text in texts]


def share_reproduced(tokenizer: Tokenizer, documents: Sequence[NDArray[np.uint32]]) -> float:
    """The share of pairs of neighboring ids that come back when the documents are decoded and
    encoded again: nearly 1 if the tokenizer made them (a document that was cut may differ at its
    ends), far less if another one did."""
    # Special tokens are left out on both sides: decoding has dropped them.
    added = tokenizer.get_added_tokens_decoder().items()
    special = {number for number, token in added if token.special}
    same = total = 0
    for ids, text in zip(documents, as_texts(documents, tokenizer), strict=True):
        stored = [number for number in ids.tolist() if number not in special]
        again = tokenizer.encode(text, add_special_tokens=False).ids
        before, after = (Counter(itertools.pairwise(ids)) for ids in (stored, again))
        same += (before & after).total()
        total += max(before.total(), after.total())
    return same / max(1, total)


def encode_in_order(
    chunks: Iterable[Chunk],
    tokenizer: TokenizerText,
    source_tokenizer: TokenizerText | None,
    workers: int,
) -> Generator[Chunk, None, None]:
    """The chunks, encoded by `workers` threads, in order. Only a few are in memory at a time.

    Threads are enough: tokenizers releases Python's lock while it encodes, 95 % of the time."""
    thread = threading.local()  # a tokenizer for each thread: its cache is not made for sharing

    def encode(chunk: Chunk) -> Chunk:
        if not hasattr(thread, "encoder"):
            thread.encoder = Encoder(tokenizer, source_tokenizer)
        return cast(Chunk, thread.encoder.encode(chunk))

    # The threads of tokenizers itself cost a quarter more and ignore --workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return map_in_threads(encode, chunks, workers, num_ahead=2 * workers)
