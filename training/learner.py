"""What methods that learn their mask learn with: packed tokens, and the training loop."""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bosch.config import Config, TrainConfig
from bosch.data.loader import TokenFolder, open_tokens
from bosch.data.tokenizer_files import read_tokenizer
from bosch.method import Learner, Learning
from bosch.run.dist import Ranks
from bosch.run.files import sync_directory
from bosch.run.progress import say
from bosch.run.stage import Artifact
from bosch.search.mask_stage import learning_settings
from bosch.sink import NO_SINK, Sink
from bosch.training.loop import TrainJob, train
from bosch.training.parallel import start_world


def make_learning(config: Config, model: Path, tokens: Artifact) -> Learning:
    """For a method that learns its mask. The training begins with these tokens again, and takes as
    many steps fewer: both share one budget."""
    opened = open_tokens(tokens.folder, read_tokenizer(model).hash)
    loop = LearnerTraining(learning_settings(config), model, opened, config.data.document_mask)

    def learn(*arguments: Any, **named: Any) -> None:
        if stopped_by := loop(*arguments, **named):
            say(f"mask: stopped by {stopped_by} and saved; run the same command again to resume")
            raise SystemExit(0)

    return Learning(learn, config.data.tokens, opened.seq_len)


@dataclass(frozen=True)
class LearnerTraining:
    """The `train` of bosch/method.py's Learning, except that it returns why it stopped. Trains
    with the settings of the recovery, but with the length that the method wants."""

    settings: TrainConfig
    model: Path  # folder of the dense model
    tokens: TokenFolder
    document_mask: bool = True

    def __call__(
        self,
        learner: Learner,
        folder: Path,
        num_steps: int,
        batch_sequences: int,
        sequence_tokens: int,
        weights_out: Path | None = None,
        sink: Sink = NO_SINK,
    ) -> str | None:
        """None if it finished. Else why it stopped early, with everything saved."""
        micro = self.settings.micro_batch_sequences
        if micro is not None:  # at most that of the recovery, and a divisor of a rank's share
            start_world()
            micro = math.gcd(micro, batch_sequences // Ranks.current().world)
        settings = replace(
            self.settings,
            batch_sequences=batch_sequences,
            micro_batch_sequences=micro,
            max_steps=num_steps,
            objective="next-token",
            until="budget",
            trained="all",
            # Gates that are drawn are others at each step, and a graph is of one draw.
            compile=False,
            on_policy=0.0,
            context_parallel=1,  # a method chooses the length that it needs
        )
        job = TrainJob(
            settings,
            self.model,
            cut_sequences(self.tokens, sequence_tokens),
            folder,
            budget_tokens=num_steps * batch_sequences * sequence_tokens,
            evaluated_shares=() if weights_out is None else (1.0,),
            document_mask=self.document_mask,
            # These may depend on the number of ranks, which must not change while a method learns.
            facts={"batch_sequences": batch_sequences, "sequence_tokens": sequence_tokens},
            learner=learner,
            sink=sink,
        )
        stopped_by = train(job)
        if stopped_by is None and weights_out is not None:
            exported = folder / f"step-{num_steps:06d}"

            def move() -> None:
                if weights_out.is_dir():  # a kill came after this rename, and it was exported again
                    shutil.rmtree(exported)
                    return
                exported.rename(weights_out)
                sync_directory(weights_out.parent)

            Ranks.current().from_rank_0(move)
        return stopped_by


def cut_sequences(tokens: TokenFolder, sequence_tokens: int) -> TokenFolder:
    """The same tokens in shorter sequences: first the first parts of all sequences, then the second
    parts, so that neighbors in the order are from different texts."""
    parts, rest = divmod(tokens.seq_len, sequence_tokens)
    assert rest == 0, "the method chooses a length that divides the packed one"
    if parts == 1:
        return tokens
    # Of two sequences a and b in two parts each:
    #     rows    a a | b b     become    a1 | a2 | b1 | b2
    #     order   0 1           becomes   0 2 1 3: a1, b1, then a2, b2
    both = tokens.train, tokens.held_out
    train, held_out = (replace(x, rows=x.rows.reshape(-1, sequence_tokens)) for x in both)
    numbers = tokens.order[:, None] * np.uint32(parts) + np.arange(parts, dtype=np.uint32)[:, None]
    summary = {**tokens.summary, "seq_len": sequence_tokens}
    order = numbers.reshape(len(tokens.order), -1)
    return replace(tokens, summary=summary, train=train, held_out=held_out, order=order)
