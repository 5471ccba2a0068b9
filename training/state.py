"""What training changes, and so what a checkpoint holds."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer


class Stateful(Protocol):
    """An object that a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainState:
    """Everything a step changes. Data order and learning rate are functions of the step, and need
    no place here."""

    model: nn.Module  # its parameters are DTensors, sharded by fully_shard
    optimizer: Optimizer
    extra: dict[str, Stateful] = field(default_factory=dict)  # the same on every rank
