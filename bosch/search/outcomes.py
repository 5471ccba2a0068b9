"""Outcomes of masks, one JSON line each: how a mask answers every haystack that was read under it.

    {"z": ["1101", "0111"], "haystacks": {"3": [accuracy, probability, log-probability]}, ...}

A search looks a mask up before it runs the model. So after a kill it asks for the same masks again,
finds their outcomes, and goes on where it stopped. `outcomes.jsonl` in the stage's folder is the
record of one search. A file of the same format in `runs/shared` serves all searches on the same
model, calibration set and window, whatever their method, ratio or objective; several of them may
append at once.

The checksum of a line also covers everything that outcomes depend on. So lines of another model or
calibration set count as damaged, as do incomplete ones; their masks are scored again."""

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bosch.calibration import Calibration
from bosch.masks.mask import Z
from bosch.model import NO_DECISION, ModelInfo, own_family
from bosch.run.dist import Ranks
from bosch.run.files import open_own_file, parse_lines, sealed_lines
from bosch.run.fingerprint import fingerprint, plain
from bosch.search.objective import Means, Outcome

FILE = "outcomes.jsonl"
VERSION = 3  # raised when the outcomes of masks change
UNSCORED = (*NO_DECISION, "dtype")  # of a model's configuration; the dtype is a separate fact


@dataclass
class Cost:
    """The cost of a search, over all attempts and ranks."""

    computed: int = 0  # evaluations that ran the model
    haystacks: int = 0  # haystacks they ran it on
    # Layers x haystacks; a part of a layer counts its share (layers.py).
    layer_forwards: float = 0.0
    evaluation_seconds: float = 0.0  # wall time

    def add(self, line: Mapping[str, Any]) -> None:
        self.computed += line["run"] > 0
        self.haystacks += line["run"]
        self.layer_forwards += line["layer_forwards"]
        self.evaluation_seconds += line["seconds"]


class Outcomes:
    """A file of outcomes. Without a folder it is empty and stores nothing."""

    def __init__(self, folder: Path | None, facts: object) -> None:
        """facts: everything that outcomes depend on. With a folder every rank makes it."""
        self.known: dict[Z, Outcome] = {}
        self.cost = Cost()
        self._path: Path | None = None
        if folder is None:
            return
        if Ranks.current().rank == 0:
            self._path = folder / FILE
        self._facts = fingerprint(facts)
        # Read once, on rank 0: what is known must not depend on when a rank looks. An error of
        # rank 0 ends every rank.
        self.known, self.cost = Ranks.current().from_rank_0(self._read)

    def _read(self) -> tuple[dict[Z, Outcome], Cost]:
        known: dict[Z, Outcome] = {}
        cost, content = Cost(), b""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_own_file(self._path, "ab+") as file:
                file.seek(0)
                content = file.read()
        for _, line in parse_lines(content, self._facts):
            if line is not None:
                z = tuple(tuple(map(int, row)) for row in line["z"])
                outcome = {int(number): Means(*m) for number, m in line["haystacks"].items()}
                # A mask may have several lines: an evaluation that ended early, and the rest of it.
                known[z] = {**known.get(z, {}), **outcome}
                cost.add(line)
        return known, cost

    def add(self, z: Z, outcome: Outcome, more: Mapping[str, object]) -> None:
        """Append a line; `more` is for people and for the cost."""
        if self._path is None:
            return
        rows = ["".join(map(str, row)) for row in z]
        line = sealed_lines([{"z": rows, "haystacks": outcome, **more}], self._facts)
        with open_own_file(self._path, "ab+") as file:
            # Several searches append to the file in runs/shared. Released on closing.
            fcntl.flock(file, fcntl.LOCK_EX)
            if size := file.seek(0, os.SEEK_END):
                file.seek(size - 1)
                if file.read(1) != b"\n":  # a search was killed while writing
                    line = b"\n" + line
            file.write(line)


def scoring_facts(
    model: PreTrainedModel, info: ModelInfo, calibration: Calibration, window_tokens: int
) -> dict[str, object]:
    """Everything that the outcome of a mask depends on."""
    haystacks = [
        [haystack.ids_T.tolist(), [[q.answer.start, q.answer.stop] for q in haystack.questions]]
        for haystack in calibration.haystacks
    ]
    return {
        "version": VERSION,
        "model": info.weight_hash or f"{info.id}@{info.revision}",
        "calibration": fingerprint(haystacks),
        "window_tokens": window_tokens,
        **facts_of(model),
    }


def facts_of(model: PreTrainedModel) -> dict[str, object]:
    """Of a model with known weights, all else that its outputs depend on."""
    configuration = model.config.to_dict()
    facts = {
        # The same weights score differently with, say, other rotary frequencies.
        "configuration": plain({n: v for n, v in configuration.items() if n not in UNSCORED}),
        "numbers": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "torch": torch.__version__,
    }
    if family := own_family(configuration):
        facts["family"] = family
    return facts
