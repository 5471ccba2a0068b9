"""The plan of a training run and its learning rate: functions of settings, tokens and step."""

import math
from dataclasses import dataclass
from typing import Any

from bosch.run.errors import UserError

# Tokens at once on a device, where nothing else is asked for: one sequence of the paper's on a
# GPU; on a CPU what stays near its caches.
MICRO_BATCH_TOKENS = {"cuda": 32_768, "cpu": 8_192}


@dataclass(frozen=True)
class TrainSchedule:
    """How many steps there are, and how the sequences of one are shared out."""

    num_steps: int
    batch_sequences: int  # of a step, over all ranks
    micro_batch_sequences: int  # at once on a rank
    seq_len: int
    world_size: int
    evaluated_steps: tuple[int, ...]  # an export, the validation loss and the evaluation
    tokens_before: int = 0  # of the budget, set aside for learning the mask

    @property
    def batch_tokens(self) -> int:
        return self.batch_sequences * self.seq_len

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.batch_sequences // (self.micro_batch_sequences * self.world_size)

    def tokens_at(self, step: int) -> int:
        return self.tokens_before + step * self.batch_tokens

    def describe(self) -> str:
        shares = f"{self.accumulation} x {self.micro_batch_sequences} sequences"
        if self.world_size > 1:
            shares += f" on each of {self.world_size} ranks"
        return (
            f"{self.num_steps:,} steps of {self.batch_tokens:,} tokens ({shares}), "
            f"{self.num_steps * self.batch_tokens:,} tokens in all; evaluated: "
            f"{', '.join(f'{step:,}' for step in self.evaluated_steps)}"
        )


def make_schedule(
    settings: Any,
    budget_tokens: int,
    seq_len: int,
    evaluated_shares: tuple[float, ...],
    world_size: int,
    device_type: str,
    tokens_before: int = 0,
) -> TrainSchedule:
    """The plan of a TrainConfig. Whole steps only: what is left of the budget is not trained on."""
    if not all(0 <= share <= 1 for share in evaluated_shares):
        raise UserError(
            f"models are evaluated at shares of the steps, from 0 to 1, not at {evaluated_shares}."
        )
    batch = settings.batch_sequences
    left = budget_tokens - tokens_before
    num_steps = left // (batch * seq_len)
    if settings.max_steps is not None:
        num_steps = min(num_steps, settings.max_steps)
    if num_steps < 1:
        raise UserError(
            f"the budget of {left:,} tokens is less than one step of {batch} sequences "
            f"of {seq_len:,} tokens. Train on more tokens, or set train.batch_sequences lower"
            + (f"; {tokens_before:,} are set aside for the mask." if tokens_before else ".")
        )
    steps = sorted({round(share * num_steps) for share in evaluated_shares})
    micro = choose_micro_batch(settings, seq_len, world_size, device_type)
    return TrainSchedule(num_steps, batch, micro, seq_len, world_size, tuple(steps), tokens_before)


def choose_micro_batch(settings: Any, seq_len: int, world_size: int, device_type: str) -> int:
    """Sequences at once on a rank: as asked, else what MICRO_BATCH_TOKENS and the batch allow."""
    batch, asked = settings.batch_sequences, settings.micro_batch_sequences
    if batch % world_size:
        raise UserError(
            f"a batch of {batch} sequences cannot be shared out evenly among {world_size} ranks; "
            f"set train.batch_sequences to a multiple of {world_size}, or start other processes."
        )
    share = batch // world_size
    divisors = [n for n in range(1, share + 1) if share % n == 0]
    if asked is None:
        most = MICRO_BATCH_TOKENS.get(device_type, MICRO_BATCH_TOKENS["cpu"]) // seq_len
        return max(n for n in divisors if n <= max(1, most))
    if asked not in divisors:
        raise UserError(
            f"micro-batches of {asked} sequences on {world_size} ranks do not add up to a batch "
            f"of {batch} ({batch} / {world_size} = {share} sequences a rank). Set "
            f"train.micro_batch_sequences to one of {', '.join(map(str, divisors))}."
        )
    return int(asked)


def learning_rate(settings: Any, step: int, num_steps: int) -> float:
    """Of the step that follows `step` finished ones: up in a line over the warm-up, then down a
    cosine, which ends at the floor behind the last step."""
    peak, warmup = settings.peak_learning_rate, round(settings.warmup_share * num_steps)
    if step < warmup:
        return float(peak * (step + 1) / warmup)
    progress = (step - warmup) / max(1, num_steps - warmup)
    floor = peak * settings.floor_share
    return float(floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
