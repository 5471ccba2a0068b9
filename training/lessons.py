"""What the teacher says of packed tokens, computed once for all runs that train on them.

    lessons-00000.npy    of one sequence or of 32,768 tokens: for each token the likeliest next
                         ones, the logarithms of their shares, and that of all others together

A training that reads them needs no teacher in memory, and no forward pass of it. A file is written
when it is whole, so a computation that was killed goes on with those that are missing.
"""
# N tokens of a micro-batch, K likeliest tokens, V vocabulary

import io
import math
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from bosch.config import TrainConfig
from bosch.data.loader import Batch, TokenFolder
from bosch.masks.mask import describe_bytes
from bosch.run.errors import UserError
from bosch.run.files import write_atomically
from bosch.run.group import Group, agree
from bosch.run.progress import track
from bosch.training.loss import CHUNK_ROWS, StoredLesson, shares_of_likeliest
from bosch.training.parallel import decide, start_world
from bosch.training.teacher import start_teacher

FILE_TOKENS = 32_768
FORWARD_TOKENS = 8_192  # at once


def write_lessons(
    folder: Path, teacher: Path, tokens: TokenFolder, settings: TrainConfig, document_mask: bool
) -> None:
    """Every rank calls this, and writes its share of the files."""
    device = start_world()
    settings = decide(settings, device)
    assert settings.stored_top_k is not None
    ranks, model = Group.current(), start_teacher(teacher, settings, device)
    sequences, length, kind = tokens.train, tokens.seq_len, record(tokens, settings.stored_top_k)
    per_file = min(max(1, FILE_TOKENS // length), len(sequences.rows))
    at_once = max(1, FORWARD_TOKENS // length)
    starts = range(0, len(sequences.rows), per_file)
    left = agree([begin for begin in starts if not file_of(folder, begin // per_file).is_file()])
    done = (len(starts) - len(left)) * per_file * length
    with track("lessons", sequences.rows.size, "tokens", min(done, sequences.rows.size)) as bar:
        for turn in range(math.ceil(len(left) / ranks.world)):
            place = turn * ranks.world + ranks.rank
            # A forward of a sharded model takes all ranks; those without a file do the last again.
            begin = left[min(place, len(left) - 1)]
            numbers = np.arange(begin, min(begin + per_file, len(sequences.rows)))
            # All ranks as many: the last file may be shorter.
            padded = np.pad(numbers, (0, per_file - len(numbers)), mode="edge")
            found = np.empty((per_file, length), kind)
            for first in range(0, per_file, at_once):
                batch = sequences.batch(padded[first : first + at_once], document_mask).to(device)
                found[first : first + at_once] = taught(model, batch, settings, kind)
            if place < len(left):
                content = io.BytesIO()
                np.save(content, found[: len(numbers)])
                write_atomically(file_of(folder, begin // per_file), content.getvalue())
            bar.advance(per_file * length * min(ranks.world, len(left) - turn * ranks.world))


@torch.no_grad()
def taught(model: Any, batch: Batch, settings: TrainConfig, kind: np.dtype[Any]) -> NDArray[Any]:
    """(sequences, tokens)"""
    inputs = {"input_ids": batch.ids_BT, "position_ids": batch.position_ids_BT}
    lesson = model.teach(inputs, batch.labels_BT)
    found = np.empty(batch.ids_BT.numel(), kind)
    for begin in range(0, len(found), CHUNK_ROWS):
        rows = slice(begin, begin + CHUNK_ROWS)
        logits_NV = F.linear(lesson.hidden_NH[rows], lesson.head_VH).float() / lesson.temperature
        ids_NK = logits_NV.topk(kind["ids"].shape[0]).indices
        found["ids"][rows] = ids_NK.cpu().numpy()
        found["log_shares"][rows] = shares_of_likeliest(logits_NV, ids_NK).cpu().numpy()
    return found.reshape(batch.ids_BT.shape)


def record(tokens: TokenFolder, likeliest: int) -> np.dtype[Any]:
    """What is stored of a token."""
    id_type = f"<u{tokens.summary['token_bytes']}"
    return np.dtype([("ids", id_type, (likeliest,)), ("log_shares", "<f2", (likeliest + 1,))])


def file_of(folder: Path, number: int) -> Path:
    return folder / f"lessons-{number:05d}.npy"


def bytes_a_token(likeliest: int, vocabulary: int) -> int:
    return likeliest * (2 if vocabulary <= 1 << 16 else 4) + 2 * (likeliest + 1)


def check_room(folder: Path, num_bytes: int) -> None:
    """Refuse before the work what the disk has no room for."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise UserError(
            f"{folder}: the teacher's likeliest tokens take {describe_bytes(num_bytes)}, and the "
            f"disk has {describe_bytes(free)} free. Lower train.stored_top_k, or leave it out to "
            "ask the teacher at every step."
        )


class Lessons:
    """A finished folder of them."""

    def __init__(self, folder: Path, settings: TrainConfig) -> None:
        self.folder, self.settings = folder, settings
        self.per_file = len(self.open(0))

    @lru_cache(maxsize=64)  # noqa: B019  one for each training
    def open(self, number: int) -> NDArray[Any]:
        found: NDArray[Any] = np.load(file_of(self.folder, number), mmap_mode="r")
        return found

    def of(self, sequences: Sequence[int], device: torch.device | str = "cpu") -> StoredLesson:
        """Those of sequences by their numbers in the tokens' file."""
        found = [self.open(number // self.per_file)[number % self.per_file] for number in sequences]
        ids, shares = (
            np.concatenate([each[name] for each in found]) for name in found[0].dtype.names
        )
        return StoredLesson(
            torch.from_numpy(ids.astype(np.int64)).to(device),
            torch.from_numpy(shares).to(device),
            self.settings.distill_weight,
            self.settings.temperature,
        )
