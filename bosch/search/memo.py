"""The memo of evaluated masks: the outcomes of all texts on disk, shared by all runs that search on
the same model, calibration set and window, whatever their method, ratio or objective.

`runs/shared/masks-<fingerprint>/` holds `facts.json`, what the scores depend on, and
`scores.jsonl`, one line per mask. Several searches may append at once. A search reads the file when
it begins, and ignores lines that are incomplete or damaged (bosch/run/files.py).
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from transformers import PreTrainedModel

from bosch.calibration import Calibration
from bosch.model import NO_DECISION, ModelInfo
from bosch.run.files import STARTED, open_own_file, parse_lines, sealed_lines, write_atomically
from bosch.run.fingerprint import fingerprint, plain
from bosch.run.group import agree, is_first
from bosch.search.journal import texts_of, z_from_texts, z_to_texts
from bosch.search.objective import Means, Z

SCORES, FACTS = "scores.jsonl", "facts.json"
VERSION = 2  # raised when the scores of masks change
UNSCORED = (*NO_DECISION, "dtype")  # of a model's configuration; the dtype is a separate fact


class Memo:
    """Outcomes by mask and text. Without a folder it is empty and stores nothing."""

    def __init__(self, folder: Path | None, facts: Mapping[str, object]) -> None:
        self._path: Path | None = None
        known: dict[Z, dict[int, Means]] = {}
        if folder is not None and is_first():
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / SCORES
            with _locked(self._path) as file:
                if not (folder / FACTS).is_file():
                    write_atomically(folder / FACTS, json.dumps(facts, indent=1) + "\n")
                file.seek(0)
                known = _parse(file.read())
        # Read once, on rank 0: which masks are known must not depend on when a rank looks.
        self._known = agree(known)

    def get(self, z: Z) -> dict[int, Means] | None:
        return self._known.get(z)

    def add(self, z: Z, texts: Mapping[int, Means]) -> None:
        if self._path is None:
            return
        line = sealed_lines([{"z": z_to_texts(z), "texts": texts}])
        with _locked(self._path) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":  # a search was killed while writing
                    line = b"\n" + line
            file.write(line)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The file, locked for reading and appending by one process."""
    with open_own_file(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released on closing
        yield file


def _parse(content: bytes) -> dict[Z, dict[int, Means]]:
    lines = (line for _, line in parse_lines(content) if line is not None)
    return {z_from_texts(line["z"]): texts_of(line) for line in lines}


def locate_memo(stage_folder: Path, facts: Mapping[str, object]) -> Path | None:
    """The folder of the memo for a run's stage. None if the folder is not a stage's."""
    if not (stage_folder / STARTED).is_file():
        return None
    return stage_folder.parent.parent / "shared" / f"masks-{fingerprint(facts)[:16]}"


def scoring_facts(
    model: PreTrainedModel, info: ModelInfo, calibration: Calibration, window_tokens: int
) -> dict[str, object]:
    """Everything that the score of a mask depends on."""
    configuration = model.config.to_dict().items()
    texts = [
        [text.ids_T.tolist(), [[q.answer.start, q.answer.stop] for q in text.questions]]
        for text in calibration.haystacks
    ]
    return {
        "version": VERSION,
        "model": info.weight_hash or f"{info.id}@{info.revision}",
        # The same weights score differently with, say, other rotary frequencies.
        "configuration": plain({n: v for n, v in configuration if n not in UNSCORED}),
        "calibration": fingerprint(texts),
        "window_tokens": window_tokens,
        "numbers": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "torch": torch.__version__,
    }
