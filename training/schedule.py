"""Number of steps, batches and learning rate of a training run, from settings and tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from bosch.config import TrainConfig
from bosch.run.errors import UserError

# Default number of tokens in a micro-batch: on a GPU one sequence of the paper, on a CPU what about
# fits its caches.
MICRO_BATCH_TOKENS = {"cuda": 32_768, "cpu": 8_192}


@dataclass(frozen=True)
class TrainSchedule:
    """How many steps there are, and how a step's sequences are split into micro-batches."""

    num_steps: int
    batch_sequences: int  # in a step, over all ranks
    micro_batch_sequences: int  # computed at once on a rank
    seq_len: int
    world_size: int
    context_parallel: int  # ranks that share each sequence
    evaluated_steps: tuple[int, ...]  # with validation loss, export and evaluation
    tokens_before: int = 0  # tokens of the budget that learning the mask has used
    # Evaluated step -> the last step, if the model has recovered there.
    endings: Mapping[int, int] = field(default_factory=dict)

    @property
    def all_evaluated_steps(self) -> list[int]:
        """Also those where a training that has recovered would end."""
        return sorted({*self.evaluated_steps, *self.endings.values()})

    @property
    def validated_steps(self) -> set[int]:
        """With the loss on held-out texts: the evaluated ones, and 1/64, 1/32, ... of all, since
        most of a gap closes early."""
        halves = (round(self.num_steps / 2**power) for power in range(7))
        return {*self.all_evaluated_steps, *(step for step in halves if step)}

    @property
    def num_groups(self) -> int:
        """Of ranks that share their sequences."""
        return self.world_size // self.context_parallel

    @property
    def batch_tokens(self) -> int:
        return self.batch_sequences * self.seq_len

    def tokens_at(self, step: int) -> int:
        return self.tokens_before + step * self.batch_tokens

    def describe(self) -> str:
        on_each = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
        if self.context_parallel > 1:
            on_each = f" on each of {self.num_groups} groups of {self.context_parallel} ranks"
        accumulation = self.batch_sequences // (self.micro_batch_sequences * self.num_groups)
        evaluated = ", ".join(f"{step:,}" for step in self.evaluated_steps) or "at no step"
        return (
            f"{self.num_steps:,} steps of {self.batch_tokens:,} tokens "
            f"({accumulation} x {self.micro_batch_sequences} sequences{on_each}), "
            f"{self.num_steps * self.batch_tokens:,} tokens in all; evaluated: {evaluated}"
        )


def make_schedule(
    settings: TrainConfig,
    budget_tokens: int,
    seq_len: int,
    evaluated_shares: tuple[float, ...],
    world_size: int,
    device_type: str,
    tokens_before: int = 0,
) -> TrainSchedule:
    """Only whole steps: what is left of the budget is not trained on."""
    batch, left = settings.batch_sequences, budget_tokens - tokens_before
    num_steps = left // (batch * seq_len)
    if settings.max_steps is not None:
        num_steps = min(num_steps, settings.max_steps)
    if num_steps < 1:
        used = f"; learning the mask uses {tokens_before:,} tokens" if tokens_before else ""
        problem = f"{left:,} tokens are less than one step of {batch} sequences of {seq_len:,}"
        raise UserError(f"{problem}. Train on more tokens or lower train.batch_sequences{used}.")
    steps = sorted({round(share * num_steps) for share in evaluated_shares})
    micro = choose_micro_batch(settings, seq_len, world_size, device_type)
    # Not in the warm-up, where the model may be no worse by not having learned yet; and with a
    # tenth of the steps left, in which the learning rate falls to zero.
    endings = {}
    if settings.until == "recovered":
        warmup, tenth = round(settings.warmup_share * num_steps), max(1, num_steps // 10)
        endings = {n: n + tenth for n in steps if n >= warmup and n + tenth < num_steps}
        if not endings:
            raise UserError(
                f"train.until is recovered, but no checkpoint is evaluated from step {warmup} (the "
                f"end of the warm-up) to {num_steps - tenth - 1}; add a share to eval.checkpoints."
            )
    return TrainSchedule(
        num_steps=num_steps,
        batch_sequences=batch,
        micro_batch_sequences=micro,
        seq_len=seq_len,
        world_size=world_size,
        context_parallel=settings.context_parallel,
        evaluated_steps=tuple(steps),
        tokens_before=tokens_before,
        endings=endings,
    )


def choose_micro_batch(
    settings: TrainConfig, seq_len: int, world_size: int, device_type: str
) -> int:
    """Sequences computed at once on a rank (of which it may have a part): the setting's, or the
    largest number that divides the rank's share of the batch and stays within MICRO_BATCH_TOKENS.
    """
    batch, micro = settings.batch_sequences, settings.micro_batch_sequences
    num_groups, sharing = check_sharing(settings, seq_len, world_size), settings.context_parallel
    if batch % num_groups:
        who = "processes" if sharing == 1 else f"groups of {sharing} processes"
        problem = f"a batch of {batch} sequences cannot be split evenly over {num_groups} {who}"
        raise UserError(f"{problem}. Set train.batch_sequences to a multiple of {num_groups}.")
    share = batch // num_groups
    divisors = [n for n in range(1, share + 1) if share % n == 0]
    if micro is None:
        # No sequence at all where one is longer than that: then one at a time.
        most = MICRO_BATCH_TOKENS[device_type] * sharing // seq_len
        return max(n for n in divisors if n <= max(1, most))
    if micro not in divisors:
        problem = f"train.micro_batch_sequences {micro} does not divide the {share} of a process"
        raise UserError(f"{problem}. Set it to one of {', '.join(map(str, divisors))}.")
    return micro


def check_sharing(settings: TrainConfig, seq_len: int, world_size: int) -> int:
    """How many groups of ranks there are that share their sequences. Each rank has two pieces of
    one (bosch/attention/pieces.py), all of one length."""
    sharing = settings.context_parallel
    if world_size % sharing:
        problem = f"train.context_parallel {sharing} does not divide the {world_size} processes"
        raise UserError(f"{problem}. Set it to a divisor, or start another number of processes.")
    pieces = 2 * sharing
    if sharing > 1 and seq_len % pieces:
        problem = f"train.context_parallel {sharing} cuts sequences into {pieces} equal pieces"
        length = max(1, seq_len // pieces) * pieces
        raise UserError(
            f"{problem}, but they have {seq_len:,} tokens. Set the option to another number, or "
            f"--data.sequence-length to {length}."
        )
    return world_size // sharing


def learning_rate(
    settings: TrainConfig, step: int, num_steps: int, ending: tuple[int, int] | None = None
) -> float:
    """For the step after `step` finished ones. Rises linearly in the warm-up, then falls along a
    cosine that reaches the floor after the last step; in an early ending (its begin and end) along
    a line to zero."""
    if ending is not None and step >= ending[0]:
        # From the rate that the cosine has come to, which asks for no ending.
        begin, end = ending
        return learning_rate(settings, begin, num_steps) * (end - step) / (end - begin)
    peak, warmup = settings.peak_learning_rate, round(settings.warmup_share * num_steps)
    if step < warmup:  # not from 0, which would waste the first step
        return float(peak * (step + 1) / warmup)
    progress = (step - warmup) / max(1, num_steps - warmup)
    floor = peak * settings.floor_share
    return float(floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
