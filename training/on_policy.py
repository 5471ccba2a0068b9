"""Steps in which the hybrid writes: it answers the questions of some training sequences itself, and
learns from what the dense model says in the place of each token that it wrote.

In all other steps the hybrid reads what the dense model wrote. What a model with windows writes
itself leads it elsewhere, and only there can it learn to come back.

What is asked, and how much is written, is a function of the step, and draws are seeded by it: a
training that was killed writes the same tokens again, with as many ranks and the same micro-batch.
"""
# B sequences of a rank, T tokens

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from bosch.data.answer_files import Answers
from bosch.data.loader import IGNORED, Batch
from bosch.run.dist import Ranks
from bosch.run.fingerprint import fingerprint
from bosch.training.answers import write_tokens

# Of the room behind a question: what is written in the first step, and in the last. Short answers
# first: the longer ones go further astray.
FIRST_SHARE, LAST_SHARE = 0.25, 1.0


@dataclass(frozen=True)
class OnPolicy:
    answers: Answers
    share: float  # of the steps
    num_steps: int
    batch_sequences: int
    at_once: int  # answers that a rank writes together: more may not fit into memory

    def is_step(self, step: int) -> bool:
        """Drawn by its number alone."""
        return bool(np.random.default_rng([3, step]).random() < self.share)

    @cached_property
    def steps(self) -> list[int]:
        """In which it writes. Drawn once: with each step anew, a step would cost as many draws as
        there were steps before it."""
        return [step for step in range(self.num_steps) if self.is_step(step)]

    def numbers(self, step: int) -> list[int]:
        """The sequences whose questions are asked, over all ranks together: one step after another
        through all that there are."""
        chosen = [*self.answers.places]
        first = bisect_left(self.steps, step) * self.batch_sequences
        return [chosen[n % len(chosen)] for n in range(first, first + self.batch_sequences)]

    def write(self, model: Any, step: int, ranks: Ranks) -> tuple[Batch, int]:
        """A rank's sequences of the step, and over all ranks the number of tokens to learn from."""
        asked = [self.ask(number) for number in self.numbers(step)]
        progress = step / max(1, self.num_steps - 1)
        share = FIRST_SHARE + (LAST_SHARE - FIRST_SHARE) * progress
        # As many for all, since a sharded model writes on all ranks together.
        most = max(max(1, round(share * answer)) for _, answer, _ in asked)
        prompts = [prompt for prompt, _, _ in asked][ranks.rank :: ranks.world]
        length = asked[0][2]
        ends, written = self.answers.end_tokens, list[list[int]]()
        model.eval()
        for begin in range(0, len(prompts), self.at_once):  # as many times on all ranks
            # Each draws other numbers.
            seed = int(fingerprint([step, ranks.rank, *([begin] if begin else [])])[:12], 16)
            part = prompts[begin : begin + self.at_once]
            written += write_tokens(model, part, most, ends, seed, stops=False)
        model.train()
        for module in model.modules():
            if isinstance(module, FSDPModule):  # the optimizer needs the shards
                module.reshard()
        ids_BT = torch.full((len(prompts), length), ends[0])
        labels_BT = torch.full_like(ids_BT, IGNORED)
        for row, (prompt, answer) in enumerate(zip(prompts, written, strict=True)):
            text = (prompt + answer)[:length]
            ids_BT[row, : len(text)] = torch.tensor(text)
            begin, end = len(prompt), len(text)
            labels_BT[row, begin - 1 : end - 1] = ids_BT[row, begin:end]
        count = int((labels_BT != IGNORED).sum())
        (total,) = ranks.sum(count)
        starts = torch.arange(0, ids_BT.numel() + 1, length, dtype=torch.int32)
        places_BT = torch.arange(length).expand_as(ids_BT).contiguous()
        numbers = tuple(self.numbers(step)[ranks.rank :: ranks.world])
        return Batch(ids_BT, labels_BT, places_BT, starts, count, numbers), int(total)

    def ask(self, number: int) -> tuple[list[int], int, int]:
        """The tokens up to the first answer, how many tokens may follow, and the sequence's
        length."""
        found = self.answers.get(number)
        assert found is not None
        begin = int(found.is_answer_T.argmax())
        room = max(1, found.end - begin)
        return found.ids_T[:begin].tolist(), room, len(found.ids_T)
