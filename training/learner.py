"""The training loop as what a method of learned masks is handed, the `Fit` of
bosch/method.py, but for what a stop means.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bosch.config import TrainConfig
from bosch.data.loader import Sequences, TokenFolder
from bosch.method import Learner
from bosch.run.group import Group
from bosch.run.manifest import sync_directory
from bosch.training.loop import TrainJob, train
from bosch.training.parallel import start_world


@dataclass(frozen=True)
class LoopFit:
    """Training as it is set up for the recovery, with the method's own length."""

    settings: TrainConfig
    model: Path  # folder of the dense model
    tokens: TokenFolder
    document_mask: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)  # what a resumed run must share

    def __call__(
        self,
        learner: Learner,
        folder: Path,
        num_steps: int,
        batch_sequences: int,
        sequence_tokens: int,
        weights_rate: float | None = None,
        weights_out: Path | None = None,
    ) -> str | None:
        """None: finished; else why it stopped, everything saved."""
        tokens = cut_sequences(self.tokens, sequence_tokens)
        micro = self.settings.micro_batch_sequences
        if micro is not None:  # no more than in the recovery, and a divisor of a rank's share
            micro = math.gcd(micro, batch_sequences // start_world().size)
        settings = replace(
            self.settings,
            batch_sequences=batch_sequences,
            micro_batch_sequences=micro,
            max_steps=num_steps,
            peak_learning_rate=weights_rate or self.settings.peak_learning_rate,
        )
        job = TrainJob(
            settings,
            self.model,
            tokens,
            folder,
            budget_tokens=num_steps * batch_sequences * sequence_tokens,
            evaluated_shares=() if weights_out is None else (1.0,),
            document_mask=self.document_mask,
            # How long a method learns may hang on the number of ranks: not in mid-course.
            facts=dict(self.facts)
            | {"batch_sequences": batch_sequences, "sequence_tokens": sequence_tokens},
            learner=learner,
        )
        stopped_by = train(job)
        if stopped_by is None and weights_out is not None:
            exported = folder / f"step-{num_steps:06d}"
            Group.current().from_rank_0(lambda: move(exported, weights_out))
        return stopped_by


def cut_sequences(tokens: TokenFolder, sequence_tokens: int) -> TokenFolder:
    """The same tokens in shorter sequences: the first parts of all packed ones, then the second, so
    that neighbors in the order are not of one text."""
    parts, rest = divmod(tokens.seq_len, sequence_tokens)
    assert rest == 0  # whoever planned has seen to it
    if parts == 1:
        return tokens

    def cut(sequences: Sequences) -> Sequences:
        return replace(sequences, rows=sequences.rows.reshape(-1, sequence_tokens))

    numbers = tokens.order[:, None] * np.uint32(parts) + np.arange(parts, dtype=np.uint32)[:, None]
    return replace(
        tokens,
        summary=dict(tokens.summary) | {"seq_len": sequence_tokens},
        train=cut(tokens.train),
        held_out=cut(tokens.held_out),
        order=numbers.reshape(len(tokens.order), -1),
    )


def move(exported: Path, target: Path) -> None:
    """A kill behind this, and before the method has noted its end, makes the export once more."""
    if target.is_dir():
        shutil.rmtree(exported)
        return
    exported.rename(target)
    sync_directory(target.parent)
