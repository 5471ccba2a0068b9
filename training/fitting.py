"""Training settings that fit the memory of this machine's GPUs, and what a step would take on
others: questions that training/rehearsal.py answers, about the config of a run."""

import os
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedConfig

from bosch.config import Config, TrainConfig
from bosch.kernels import choose_kernels
from bosch.known_models import known_config
from bosch.model import fetch_config, find_model
from bosch.run import memory
from bosch.run.dist import Ranks, start_ranks
from bosch.run.progress import say, show_rows
from bosch.training import rehearsal
from bosch.training.model_start import read_config
from bosch.training.parallel import choose_device
from bosch.training.rehearsal import Plan, as_hybrid


@dataclass(frozen=True)
class Fitted:
    """A run's training settings with what fits this machine."""

    config: Config
    world_size: int
    is_named: bool  # the user named the micro-batch

    @cached_property
    def train(self) -> TrainConfig:
        """With the largest micro-batch up to the config's that fits these GPUs, and the fastest way
        to save memory that does. Worked out when it is first asked for, in a minute or a few.
        A micro-batch that the user named is refused if it does not fit, and so is a model that
        fits with none, and what the machine with the least host memory cannot park.

        Rank 0 decides, by the least memory of all ranks' GPUs: ranks with settings of their own,
        on slightly unequal machines, would wait for each other forever."""
        settings = self.config.train
        start_ranks()
        ranks = Ranks.current()
        # First all succeed, then all tell: a rank that fails would leave the others waiting.
        memory_gb = memory.least(ranks.gather(ranks.all_succeed(rehearsal.gpu_memory_gb)))
        host_bytes = memory.least(ranks.gather(memory.available_host_bytes()))
        if memory_gb is None:  # no GPU
            return settings

        def choose() -> TrainConfig:
            # Once here, since the rehearsal's own process sees no GPU to choose kernels for.
            kernels, _ = choose_kernels(settings.kernels, choose_device(os.environ))
            plan = make_plan(self.config, self.world_size, kernels)
            plan = rehearsal.with_room_to_park(plan, host_bytes)
            say("rehearsing a training step, which takes a minute or a few")
            return rehearsal.choose_fitting(plan, memory_gb, self.is_named)

        return ranks.from_rank_0(choose)


def make_plan(config: Config, num_gpus: int, kernels: str = "torch") -> Plan:
    """A training step as training/rehearsal.py estimates it."""
    model = as_hybrid(shape_of(config.model), config.ratio, config.window)
    teacher = shape_of(config.train.teacher) if config.train.teacher else None
    return Plan(model, config.train, config.data.sequence_length, num_gpus, kernels, teacher)


def shape_of(model: str) -> PreTrainedConfig:
    """A model's config. Those of the paper's models are known without fetching anything."""
    known = known_config(model) if find_model(model) is None else None
    return known or read_config(fetch_config(model))


def rehearse(config: Config, num_gpus: int) -> None:
    """Print the memory that a training step would take (training/rehearsal.py)."""
    # Without a GPU here the question is about others, most likely with the memory of an H100.
    memory_gb = rehearsal.gpu_memory_gb() or 80.0
    kernels = rehearsal.KERNELS if config.train.kernels == "auto" else (config.train.kernels,)
    plans = [make_plan(config, num_gpus, each) for each in kernels]
    rows = [rehearsal.rehearse(plan).row(plan, memory_gb) for plan in plans]
    title = f"{config.model}, {config.data.sequence_length:,} tokens, on GPUs of {memory_gb:.0f} GB"
    show_rows(title, rows, rehearsal.COLUMNS)
    say(rehearsal.describe_parked(plans[0]))
