"""Batches of packed tokens as a pure function of the step: nothing to save, nothing to restore.

    tokens = open_tokens(folder, tokenizer_hash)
    loader = Loader(tokens, batch_sequences=64)
    make = lambda step: loader.batch(step, rank, world)
    for step, batch in prefetch(make, range(first, last)): ...

The sequences of a step, all ranks together, are the same for every number of ranks. Each batch
tells where its documents end in three ways: `cu_seqlens`, position ids that begin again, and labels
that predict nothing across an end."""
# B sequences of a rank, T tokens

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bosch.data.ahead import map_ahead
from bosch.data.token_files import DOC_ENDS, HELD_OUT, HELD_OUT_DOC_ENDS, ORDER, SUMMARY, TOKENS
from bosch.run.errors import MissingFileError, UserError
from bosch.run.manifest import MANIFEST, read_sealed_json, verify_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORED = -100  # a label that is no target, as torch's cross entropy has it

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Rows of one rank. Documents end where rows do, too."""

    ids_BT: "Tensor"  # int64
    labels_BT: "Tensor"  # the next token, or IGNORED behind the last one of a document
    position_ids_BT: "Tensor"  # from 0 in each document
    cu_seqlens: "Tensor"  # int32, 0 first, over the flattened rows
    max_seqlen: int  # of the longest document
    num_targets: int  # labels that count, in these rows
    sequences: tuple[int, ...]  # numbers of the rows in tokens.bin

    def to(self, device: "torch.device | str") -> "Batch":
        """On a device; copied while the host goes on if the tensors are pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> "Batch":
        """In memory that a GPU can copy from by itself."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: "Callable[[Tensor], Tensor]") -> "Batch":
        from torch import Tensor

        moved: dict[str, Any] = {
            name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class Sequences:
    """Rows of tokens, memory-mapped, and where documents end in them."""

    rows: NDArray[Any]  # (sequences, T)
    doc_ends: NDArray[np.uint64]

    def batch(self, numbers: NDArray[np.int64], document_mask: bool = True) -> Batch:
        """The rows of these numbers. Without the document mask each row counts as one document."""
        import torch  # here, for --help and wrong command lines load no torch

        num_rows, num_tokens = len(numbers), self.rows.shape[1]
        ids_BT = self.rows[numbers].astype(np.int64)
        starts = [
            row * num_tokens + self.starts(int(n), document_mask) for row, n in enumerate(numbers)
        ]
        cu_seqlens = np.append(np.concatenate(starts), num_rows * num_tokens)
        lengths = np.diff(cu_seqlens)
        labels = np.empty(num_rows * num_tokens, np.int64)
        labels[:-1] = ids_BT.reshape(-1)[1:]
        labels[cu_seqlens[1:] - 1] = IGNORED
        # Counting up by 1, and at each start back by the length of the document before: one pass,
        # several times as fast as subtracting starts that are repeated over their documents.
        steps = np.ones(num_rows * num_tokens, np.int64)
        steps[0] = 0
        steps[cu_seqlens[1:-1]] -= lengths[:-1]
        return Batch(
            torch.from_numpy(ids_BT),
            torch.from_numpy(labels).view(num_rows, num_tokens),
            torch.from_numpy(np.cumsum(steps, out=steps)).view(num_rows, num_tokens),
            torch.from_numpy(cu_seqlens.astype(np.int32)),
            int(lengths.max()),
            num_rows * num_tokens - len(lengths),
            tuple(int(number) for number in numbers),
        )

    def starts(self, number: int, document_mask: bool) -> NDArray[np.int64]:
        """Where documents begin in a row, 0 always among them."""
        if not document_mask:
            return np.zeros(1, np.int64)
        num_tokens = self.rows.shape[1]
        begin, end = number * num_tokens, (number + 1) * num_tokens
        # Bounds of the array's own type: with others numpy would convert all of it at every call.
        begin_u64, end_u64 = np.array([begin, end], self.doc_ends.dtype)
        first = np.searchsorted(self.doc_ends, begin_u64, side="right")
        last = np.searchsorted(self.doc_ends, end_u64)
        inside = self.doc_ends[first:last].astype(np.int64) - begin
        return np.concatenate([np.zeros(1, np.int64), inside])


@dataclass(frozen=True)
class TokenFolder:
    """What packing left in a folder."""

    path: Path
    summary: dict[str, Any]
    train: Sequences
    held_out: Sequences
    order: NDArray[np.uint32]  # (epochs, sequences)

    @property
    def seq_len(self) -> int:
        return int(self.summary["seq_len"])


def open_tokens(folder: Path, tokenizer_hash: str) -> TokenFolder:
    """A folder of tokens of this very tokenizer."""
    if not (folder / SUMMARY).is_file():
        raise MissingFileError(
            f"{folder} holds no finished tokens: there is no {SUMMARY}. Make them with "
            "recipes/prepare_tokens.py."
        )
    summary = read_sealed_json(folder / SUMMARY)
    check_tokenizer(folder, summary, tokenizer_hash)
    seq_len = int(summary["seq_len"])

    def read(tokens: str, ends: str, count: int) -> Sequences:
        dtype = np.dtype(f"<u{summary['token_bytes']}")
        path = folder / tokens
        size = count * seq_len * dtype.itemsize
        if not path.is_file() or path.stat().st_size != size:
            there = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is missing"
            raise UserError(
                f"{path} {there}, and {SUMMARY} says {size:,}: it is damaged. Make it anew."
            )
        # An empty file cannot be mapped.
        flat = np.memmap(path, dtype, mode="r") if count else np.empty(0, dtype)
        return Sequences(flat.reshape(count, seq_len), np.load(folder / ends))

    return TokenFolder(
        folder,
        summary,
        read(TOKENS, DOC_ENDS, summary["num_sequences"]),
        read(HELD_OUT, HELD_OUT_DOC_ENDS, summary["num_held_out_sequences"]),
        np.load(folder / ORDER),
    )


def check_tokenizer(folder: Path, summary: dict[str, Any], tokenizer_hash: str) -> None:
    if summary["tokenizer_hash"] != tokenizer_hash:
        raise UserError(
            f"{folder} holds tokens of another tokenizer ({summary['tokenizer_hash'][:12]}; the "
            f"model's is {tokenizer_hash[:12]}). Training on foreign ids teaches nonsense without "
            "an error, so they are refused: prepare the tokens with this model's tokenizer."
        )


def check_reuse(
    folder: Path, tokenizer_hash: str, seq_len: int, num_sequences: int, verify: bool = True
) -> None:
    """Whether the tokens of another run (--tokens-from) are whole, and what this run needs."""
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} is not complete: it has no {MANIFEST}. Finish the run that was making it."
        )
    if verify:
        verify_folder(folder)
    summary = read_sealed_json(folder / SUMMARY)
    check_tokenizer(folder, summary, tokenizer_hash)
    if summary["seq_len"] != seq_len:
        found = f"{summary['seq_len']:,} tokens, and this run needs {seq_len:,}"
        raise UserError(f"{folder} holds sequences of {found}.")
    there = summary["num_sequences"] * summary["epochs"]
    if there < num_sequences:
        raise UserError(
            f"{folder} holds {there:,} sequences, its {summary['epochs']} stored epochs together, "
            f"and this run needs {num_sequences:,}. Train on fewer tokens, or prepare more."
        )


@dataclass(frozen=True)
class Loader:
    """Batches of a fixed number of sequences in the stored order, epoch behind epoch."""

    tokens: TokenFolder
    batch_sequences: int
    document_mask: bool = True

    @property
    def num_steps(self) -> int:
        """Steps the stored orders hold."""
        return self.tokens.order.size // self.batch_sequences

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """The rows of a rank in a step: rank, rank + world, ... of the step's sequences."""
        if self.batch_sequences % world:
            raise UserError(
                f"A batch of {self.batch_sequences} sequences cannot be shared by {world} ranks; "
                f"use a multiple of {world}."
            )
        return self.tokens.train.batch(self.sequences(step)[rank::world], self.document_mask)

    def sequences(self, step: int) -> NDArray[np.int64]:
        """Numbers of the sequences of a step, all ranks together."""
        if not 0 <= step < self.num_steps:
            epochs = len(self.tokens.order)
            raise UserError(
                f"There is no batch for step {step}: the {epochs} stored epoch(s) of "
                f"{self.tokens.path} hold {self.num_steps:,} batches of {self.batch_sequences} "
                "sequences. Train on fewer tokens (--data.tokens of recover.py, --budget of "
                "train_model.py), or pack more of them, or more epochs (prepare_tokens.py "
                "--tokens, --epochs), and use that folder (--data.tokens-from, --tokens)."
            )
        begin = step * self.batch_sequences
        numbers = self.tokens.order.reshape(-1)[begin : begin + self.batch_sequences]
        return numbers.astype(np.int64)

    def num_targets(self, step: int) -> int:
        """Labels that count in a step over all ranks, known without asking another rank."""
        train = self.tokens.train
        documents = sum(
            len(train.starts(int(number), self.document_mask)) for number in self.sequences(step)
        )
        return self.batch_sequences * self.tokens.seq_len - documents

    def held_out(self, batch_sequences: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The rank's share of the held-out slice, in a fixed order. The last batch may be small."""
        numbers = np.arange(len(self.tokens.held_out.rows), dtype=np.int64)[rank::world]
        for begin in range(0, len(numbers), batch_sequences):
            some = numbers[begin : begin + batch_sequences]
            yield self.tokens.held_out.batch(some, self.document_mask)


def prefetch(
    make: Callable[[int], T], steps: Iterable[int], ahead: int = 2
) -> Generator[tuple[int, T], None, None]:
    """(step, make(step)), made in a thread up to `ahead` early. An error comes out at its step."""
    return map_ahead(lambda step: (step, make(step)), steps, 1, ahead)
