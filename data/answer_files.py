"""The files of answers: training sequences in which the dense model answers a question about the
sequence's own text, in place of that text. training/answers.py writes them.

    answers-00000.npy    of each such sequence a row (`row_type`)
    answers.json         the summary: which share of the sequences, and what was asked

Only the tokens of answers are learned from. What is left of a sequence behind its last answer holds
end tokens, in a document of their own.
"""
# T tokens

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bosch.run.files import read_sealed_json

FILE, SUMMARY = "answers-{:05d}.npy", "answers.json"
FILE_TOKENS = 32_768


def row_type(seq_len: int, token_bytes: int) -> np.dtype[Any]:
    facts = [("sequence", "<u4"), ("task", "u1"), ("attempt", "u1")]
    facts += [("in_chat", "u1"), ("is_drawn", "u1")]
    targets = ("targets", "u1", (-(-seq_len // 8),))  # a bit for each token: of an answer or not
    return np.dtype([*facts, ("end", "<u4"), targets, ("ids", f"<u{token_bytes}", (seq_len,))])


def choose_sequences(share: float, num_sequences: int) -> list[int]:
    """The numbers of those that become answers, in rising order. Each is drawn by its number
    alone, as those with repeats are; not by the random numbers that choose those, but by the ones
    that choose the lengths of their blocks (data/loader.py)."""
    every = range(num_sequences)
    return [n for n in every if np.random.default_rng([2, n]).random() < share]


def rows_in_file(seq_len: int) -> int:
    return max(1, FILE_TOKENS // seq_len)


@dataclass(frozen=True)
class Answered:
    """A training sequence with answers."""

    ids_T: NDArray[np.unsignedinteger]
    is_answer_T: NDArray[np.bool_]
    end: int  # of the document


@dataclass(frozen=True)
class Answers:
    """A finished folder of them."""

    folder: Path

    @cached_property
    def places(self) -> dict[int, int]:
        """Number of a sequence -> its row, counted over all files."""
        summary = read_sealed_json(self.folder / SUMMARY, "share", "num_sequences", "answers")
        chosen = choose_sequences(summary["share"], summary["num_sequences"])
        assert len(chosen) == summary["answers"]
        return {number: place for place, number in enumerate(chosen)}

    def get(self, number: int) -> Answered | None:
        """None for a sequence that stays as it is."""
        if (place := self.places.get(number)) is None:
            return None
        length = open_file(self.folder / FILE.format(0))["ids"].shape[1]
        file, row = divmod(place, rows_in_file(length))
        found = open_file(self.folder / FILE.format(file))[row]
        assert found["sequence"] == number
        is_answer_T = np.unpackbits(found["targets"], count=length).astype(bool)
        return Answered(found["ids"], is_answer_T, int(found["end"]))

    @cached_property
    def end_tokens(self) -> list[int]:
        """After which the dense model writes no more."""
        found = read_sealed_json(self.folder / SUMMARY, "end_tokens")
        return list(map(int, found["end_tokens"]))


@lru_cache(maxsize=64)
def open_file(path: Path) -> NDArray[Any]:
    # Mapped, not read: a batch needs a few rows of some files, of which there may be thousands.
    return np.load(path, mmap_mode="r")
