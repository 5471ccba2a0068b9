"""Batches of packed tokens as a pure function of the step: nothing to save, nothing to restore.

    loader = Loader(open_tokens(folder, tokenizer_hash), batch_sequences=64)
    batches = prefetch(lambda step: loader.batch(step, rank, world), range(first, last))

The sequences of a step, over all ranks together, do not depend on the number of ranks. A batch
marks its document ends in three ways: `cu_seqlens`, position ids that restart at 0, and labels that
predict nothing across an end. In a sequence with an answer (data/answer_files.py) only the answer's
tokens are labels."""
# B sequences of a rank, T tokens

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bosch.data import token_files
from bosch.data.answer_files import Answered, Answers
from bosch.data.token_files import DOC_ENDS, HELD_OUT, HELD_OUT_DOC_ENDS, SUMMARY, TOKENS
from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import MANIFEST, DamagedArtifactError, read_sealed_json
from bosch.run.stage import Artifact

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORED = -100  # a label that is no target, as torch's cross entropy has it

In = TypeVar("In")
T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Sequences of one rank. A document also ends where its sequence does."""

    ids_BT: "Tensor"  # int64
    labels_BT: "Tensor"  # the next token, or IGNORED at the last one of a document
    position_ids_BT: "Tensor"  # from 0 in each document
    cu_seqlens: "Tensor"  # int32, from 0, over the flattened sequences
    num_targets: int  # labels that are not IGNORED
    sequences: tuple[int, ...]  # their numbers in tokens.bin

    def ends(self) -> list[tuple[int, ...]]:
        """Where documents end in each sequence, from 0 on."""
        rows, length = self.ids_BT.shape
        ends = self.cu_seqlens.tolist()
        return [
            tuple(end - first for end in ends if first <= end <= first + length)
            for first in range(0, rows * length, length)
        ]

    def to(self, device: "torch.device | str") -> "Batch":
        """A copy on a device. From pinned memory the host does not wait for it."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> "Batch":
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: "Callable[[Tensor], Tensor]") -> "Batch":
        return replace(
            self,
            ids_BT=function(self.ids_BT),
            labels_BT=function(self.labels_BT),
            position_ids_BT=function(self.position_ids_BT),
            cu_seqlens=function(self.cu_seqlens),
        )


@dataclass(frozen=True)
class Sequences:
    """Tokens, memory-mapped, and where documents end in them."""

    rows: NDArray[np.unsignedinteger]  # (sequences, T)
    doc_ends: NDArray[np.uint64]
    repeats: float = 0.0  # share of them that `repeat_passages` rewrites
    repeat_block: int | None = None  # least tokens of a block of these; None: whole sequences
    answers: Answers | None = None  # which stand in place of some of them

    def batch(self, numbers: NDArray[np.int64], document_mask: bool = True) -> Batch:
        """The sequences of these numbers. Without the document mask each is one document."""
        import torch  # here, for --help and wrong command lines load no torch

        ids_BT = self.rows[numbers].astype(np.int64)
        for row, number in zip(ids_BT, numbers, strict=True):
            if (answer := self.answer_in(number)) is not None:
                row[:] = answer.ids_T
            elif self.repeats_in(number):
                row[:] = repeat_passages(row, number, self.repeat_block)
        length, total = ids_BT.shape[1], ids_BT.size
        starts = [row * length + self.starts(n, document_mask) for row, n in enumerate(numbers)]
        cu_seqlens = np.append(np.concatenate(starts), total)
        lengths = np.diff(cu_seqlens)
        # Two documents of 3 and 2 tokens:     ids     a b c d e
        #                                      labels  b c - e -      (-: IGNORED)
        labels = np.append(ids_BT.reshape(-1)[1:], IGNORED)
        labels[cu_seqlens[1:] - 1] = IGNORED
        for row, number in enumerate(numbers):
            if (answer := self.answer_in(number)) is not None:
                # A label is the token after its place.
                is_label_T = np.append(answer.is_answer_T[1:], False)
                labels[row * length : (row + 1) * length][~is_label_T] = IGNORED
        # Position ids count up by 1, and at each start drop by the length of the document before:
        #     steps      0  1  1 -2  1
        #     their sum  0  1  2  0  1
        # One pass, several times as fast as subtracting each document's start from its tokens.
        steps = np.ones(total, np.int64)
        steps[0] = 0
        steps[cu_seqlens[1:-1]] -= lengths[:-1]
        return Batch(
            torch.from_numpy(ids_BT),
            torch.from_numpy(labels).view(ids_BT.shape),
            torch.from_numpy(np.cumsum(steps, out=steps)).view(ids_BT.shape),
            torch.from_numpy(cu_seqlens.astype(np.int32)),
            sum(self.num_targets(number, document_mask) for number in numbers),
            tuple(numbers.tolist()),
        )

    def starts(self, number: int, document_mask: bool) -> NDArray[np.int64]:
        """Where documents begin in a sequence; 0 is always one of them."""
        if (answer := self.answer_in(number)) is not None:
            has_rest = document_mask and answer.end < self.rows.shape[1]
            return np.array([0, answer.end] if has_rest else [0])
        # A sequence with repeats is one document: what is repeated must be seen from its repeat.
        if not document_mask or self.repeats_in(number):
            return np.zeros(1, np.int64)
        # Ends count from the first token of all, and the sequence's own span is [begin, end). A
        # document that ends exactly at `begin` is not in it ("right"); one that ends at `end` does
        # not begin another here ("left").
        # Bounds of the array's own type: with another, numpy would convert the array at every call.
        begin, end = np.array([number, number + 1], self.doc_ends.dtype) * self.rows.shape[1]
        first = np.searchsorted(self.doc_ends, begin, side="right")
        last = np.searchsorted(self.doc_ends, end)
        return np.append(0, (self.doc_ends[first:last] - begin).astype(np.int64))

    def num_targets(self, number: int, document_mask: bool) -> int:
        """Labels that are not IGNORED in a sequence."""
        if (answer := self.answer_in(number)) is not None:
            return int(answer.is_answer_T.sum())
        # The last token of each document predicts nothing, whatever its length.
        return self.rows.shape[1] - len(self.starts(number, document_mask))

    def answer_in(self, number: int) -> Answered | None:
        """What stands in place of the sequence's text, if anything does."""
        return None if self.answers is None else self.answers.get(int(number))

    def repeats_in(self, number: int) -> bool:
        """Drawn by the sequence's number alone, so the same in every epoch and on every rank."""
        return bool(self.repeats and np.random.default_rng([0, number]).random() < self.repeats)


def repeat_passages(
    row_T: NDArray[np.int64], number: int, least_block: int | None
) -> NDArray[np.int64]:
    """One document whose passages come back, in one block as long as the sequence or in two, four
    or more shorter ones. Ordinary text seldom depends on what stood far before; here it does,
    further back than a window reaches, so that a hybrid learns to read there with the groups that
    still can. It learns that at the distances which it meets, hence blocks of several lengths. It
    holds nothing that a suite asks for."""
    # [1, number] and [2, number]: other streams of numbers than the [0, number] that chose the
    # sequence; those chosen would else all have short passages.
    rng, blocks = np.random.default_rng([1, number]), [row_T]
    if least_block is not None:
        # 1, 2, 4 and so on, each as likely, while none is shorter than the least. One if the whole
        # sequence is: a method that learns its mask cuts the packed ones (training/learner.py).
        choices = max(1, (len(row_T) // least_block).bit_length())
        halvings = int(np.random.default_rng([2, number]).integers(choices))
        blocks = np.array_split(row_T, 2**halvings)
    return np.concatenate([repeat_in_block(block_T, rng) for block_T in blocks])


def repeat_in_block(block_T: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Its passages a, b, a, c, b."""
    length = len(block_T)
    a, b = (int(length * rng.uniform(low, low + 0.1)) for low in (0.1, 0.2))
    first, second, rest = block_T[:a], block_T[a : a + b], block_T[a + b : length - a - b]
    return np.concatenate([first, second, first, rest, second])


@dataclass(frozen=True)
class TokenFolder:
    """What packing wrote into a folder."""

    path: Path
    summary: dict[str, Any]
    train: Sequences
    held_out: Sequences
    order: NDArray[np.uint32]  # (epochs, sequences)

    @property
    def seq_len(self) -> int:
        return int(self.summary["seq_len"])


def open_tokens(folder: Path, tokenizer_hash: str, answers: Path | None = None) -> TokenFolder:
    """The tokens in a folder, which must be this tokenizer's. `answers`: folder of those that stand
    in place of some sequences."""
    summary = read_summary(folder, tokenizer_hash)
    seq_len = int(summary["seq_len"])

    # The sizes say whether files belong to this summary: a checksum of all tokens takes minutes,
    # and every rank and every restart opens them.
    def read(tokens: str, ends: str, count: int) -> Sequences:
        dtype, path = np.dtype(f"<u{summary['token_bytes']}"), folder / tokens
        size = count * seq_len * dtype.itemsize
        if not path.is_file() or path.stat().st_size != size:
            problem = f"{path} is missing, or has not the {size:,} bytes that {SUMMARY} says"
            raise DamagedArtifactError(f"{problem}. {token_files.MAKE_AGAIN}")
        # An empty file cannot be mapped.
        flat = np.memmap(path, dtype, mode="r") if count else np.empty(0, dtype)
        rows, doc_ends = flat.reshape(count, seq_len), token_files.read_array(folder / ends)
        return Sequences(rows, doc_ends)

    train = read(TOKENS, DOC_ENDS, summary["num_sequences"])
    return TokenFolder(
        folder,
        summary,
        replace(
            train,
            repeats=summary.get("repeats", 0.0),
            repeat_block=summary.get("repeat_block"),
            answers=None if answers is None else Answers(answers),
        ),
        read(HELD_OUT, HELD_OUT_DOC_ENDS, summary["num_held_out_sequences"]),
        token_files.read_array(folder / token_files.ORDER),
    )


def read_summary(folder: Path, tokenizer_hash: str) -> dict[str, Any]:
    """The summary of tokens, which must be this tokenizer's."""
    if not (folder / SUMMARY).is_file():
        raise MissingFileError(
            f"{folder} holds no complete tokens: it has no {SUMMARY}. Make them: bosch tokens."
        )
    summary = read_sealed_json(folder / SUMMARY, "tokenizer_hash", "num_sequences", "seq_len")
    if summary["tokenizer_hash"] != tokenizer_hash:
        problem = f"{folder} holds tokens of another tokenizer than the model's"
        raise UserError(f"{problem}. Prepare the tokens with this model's tokenizer.")
    return summary


def check_reuse(
    folder: Path, tokenizer_hash: str, seq_len: int, num_sequences: int, verify: bool = True
) -> None:
    """Refuse another run's tokens (--tokens-from) if incomplete or not what this run needs."""
    if not (folder / MANIFEST).is_file():
        raise MissingFileError(
            f"{folder} is not complete: it has no {MANIFEST}. Finish the run that was making it."
        )
    if verify:
        Artifact.load(folder)
    summary = read_summary(folder, tokenizer_hash)
    if summary["seq_len"] != seq_len:
        problem = f"{folder} holds sequences of {summary['seq_len']:,} tokens, not of {seq_len:,}"
        raise UserError(f"{problem}. Prepare tokens of this length, or set --sequence-length.")
    available = summary["num_sequences"] * summary["epochs"]
    if available < num_sequences:
        raise UserError(
            f"{folder} holds {available:,} sequences in {summary['epochs']} epochs, and this run "
            f"needs {num_sequences:,}. Train on fewer tokens, or prepare more."
        )


@dataclass(frozen=True)
class Loader:
    """Batches of a fixed number of sequences in the stored order, one epoch after another."""

    tokens: TokenFolder
    batch_sequences: int
    document_mask: bool = True

    @property
    def num_steps(self) -> int:
        """Batches in all stored epochs."""
        return self.tokens.order.size // self.batch_sequences

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """A rank's sequences of a step: number rank, rank + world, ... of the step's sequences."""
        return self.tokens.train.batch(self.sequences(step)[rank::world], self.document_mask)

    def sequences(self, step: int) -> NDArray[np.int64]:
        """Numbers of the sequences of a step, over all ranks together."""
        if not 0 <= step < self.num_steps:
            epochs = len(self.tokens.order)
            raise UserError(
                f"There is no batch for step {step}: {self.tokens.path} holds {epochs} epoch(s), "
                f"{self.num_steps:,} batches of {self.batch_sequences} sequences. Train on fewer "
                "tokens (--data.tokens of `bosch recover`, --tokens of `bosch train`), or pack "
                "more (`bosch tokens` --tokens, --epochs) and use that folder "
                "(--data.tokens-from, --tokens-from)."
            )
        begin = step * self.batch_sequences
        return self.order[begin : begin + self.batch_sequences].astype(np.int64)

    @cached_property
    def order(self) -> NDArray[np.uint32]:
        """Numbers of the sequences, the epochs one after another; a batch may take the last of one
        and the first of the next. Sequences with answers fill batches of their own, spread evenly
        between those of text: every target of a batch counts the same, and beside those of a text
        the few of an answer would count next to nothing."""
        stored, size = self.tokens.order.reshape(-1), self.batch_sequences
        answers = self.tokens.train.answers
        if answers is None or not answers.places:
            return stored
        is_answer = np.isin(stored, [*answers.places])
        answered, texts = stored[is_answer], stored[~is_answer]
        num_answered, num_texts = len(answered) // size, len(texts) // size
        num_batches = num_answered + num_texts
        # With 2 batches of answers among 6:   step * 2 // 6     0 0 0 1 1 1 2
        #                                      it rises after        #     #
        risen = np.arange(num_batches + 1) * num_answered // max(1, num_batches)
        is_answer_batch = np.diff(risen).astype(bool)
        batches = np.empty((num_batches, size), stored.dtype)
        batches[is_answer_batch] = answered[: num_answered * size].reshape(-1, size)
        batches[~is_answer_batch] = texts[: num_texts * size].reshape(-1, size)
        # What fills no batch of one kind comes last.
        left = answered[num_answered * size :], texts[num_texts * size :]
        return np.concatenate([batches.reshape(-1), *left])

    def num_targets(self, step: int) -> int:
        """Labels that are not IGNORED in a step, over all ranks, without communication."""
        train, numbers = self.tokens.train, self.sequences(step)
        return sum(train.num_targets(number, self.document_mask) for number in numbers)

    def held_out(self, batch_sequences: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The rank's share of the held-out slice, in a fixed order. The last batch can be small."""
        # In the order of the file, never shuffled: the same loss at every step, and of every run.
        numbers = np.arange(len(self.tokens.held_out.rows), dtype=np.int64)[rank::world]
        for begin in range(0, len(numbers), batch_sequences):
            part = numbers[begin : begin + batch_sequences]
            yield self.tokens.held_out.batch(part, self.document_mask)


def prefetch(
    make: Callable[[int], T], steps: Iterable[int]
) -> Generator[tuple[int, T], None, None]:
    """(step, make(step)) for each step, made in a thread up to two steps early. An error is raised
    at its step."""
    return map_in_threads(lambda step: (step, make(step)), steps, num_threads=1, num_ahead=2)


def map_in_threads(
    function: Callable[[In], T], items: Iterable[In], num_threads: int, num_ahead: int
) -> Generator[T, None, None]:
    """function(item) for each item, in order, computed up to `num_ahead` items early. An error is
    raised at its item."""
    # Not `pool.map`, which takes all items at once: of a source without an end, forever.
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > num_ahead:
                    yield pending.popleft().result()
            yield from (future.result() for future in pending)
        finally:  # also where the caller has enough and closes this
            pool.shutdown(cancel_futures=True)
