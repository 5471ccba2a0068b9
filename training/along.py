"""What is learned along with a model: a few parameters of a method, whole on every rank, in the
same optimizer and the same checkpoints.

Their gradients are averaged over the ranks as fully_shard averages the model's, and they stay out
of the norm by which the model's gradient is clipped.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from bosch.method import Learner
from training.parallel import World


class Along:
    """A learner on its way through the loop. None: nothing is learned along, and every call does
    nothing."""

    def __init__(self, learner: Learner | None, optimizer: Optimizer, world: World) -> None:
        self._learner, self._world = learner, world
        self.gradient_norm = 0.0
        self._groups: list[dict[str, Any]] = []
        self._peaks: list[float] = []
        if learner is not None:
            learner.module.to(world.device)
            first = len(optimizer.param_groups)
            for group in learner.parameter_groups():
                optimizer.add_param_group(group)
            self._groups = optimizer.param_groups[first:]
            self._peaks = [group["lr"] for group in self._groups]

    @property
    def curves(self) -> str:
        """What the curves are called: those of a mask stand beside those of the training."""
        return "train" if self._learner is None else "mask"

    @property
    def modules(self) -> dict[str, nn.Module]:
        """For the checkpoints."""
        return {} if self._learner is None else {"learner": self._learner.module}

    def set_rates(self, done: int) -> None:
        for group, peak in zip(self._groups, self._peaks, strict=True):
            assert self._learner is not None
            group["lr"] = peak * self._learner.rate(done)

    def model_arguments(self, done: int) -> dict[str, Any]:
        """Made anew for every micro-batch: each has a backward pass of its own."""
        return {} if self._learner is None else self._learner.model_arguments(done)

    def finish_gradients(self) -> None:
        """Behind the last backward pass of a step. The extra loss is the same on every rank, so its
        gradient comes after the mean."""
        if self._learner is None:
            return
        for parameter in self._learner.module.parameters():
            if parameter.grad is None:  # no gate was between its ends
                parameter.grad = torch.zeros_like(parameter)
            if self._world.size > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self._world.size
        self._learner.extra_loss().backward()
        gradients = [p.grad for p in self._learner.module.parameters() if p.grad is not None]
        self.gradient_norm = float(torch.nn.utils.get_total_norm(gradients))

    def after_step(self, step: int) -> None:
        if self._learner is not None:
            self._learner.after_step(step)

    def figures(self) -> dict[str, float]:
        if self._learner is None:
            return {}
        return {"gate_grad_norm": self.gradient_norm, **self._learner.figures()}
