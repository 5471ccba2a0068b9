"""AdamW over sharded fp32 parameters, and over what a method learns along with a model."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from bosch.method import Learner
from training.parallel import World, whole

EPSILON = 1e-8


def make_optimizer(model: nn.Module, settings: Any) -> torch.optim.AdamW:
    """AdamW of a TrainConfig: weight decay on matrices, none on norms and biases.

    Made before any forward: after one, the root's parameters are not those the optimizer must hold.
    """
    parameters = trained_parameters(model)
    for parameter in parameters:
        # AdamW at a learning rate of 1e-5 moves only 14 % of bf16 weights in 50 steps (measured):
        # the rest of the updates is rounded away.
        assert parameter.dtype == torch.float32, f"a parameter is {parameter.dtype}"
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.peak_learning_rate,
        betas=settings.betas,
        eps=EPSILON,
        fused=True,
    )


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """In the model's order: a sum of norms depends on it in its last bit."""
    return [p for p in model.parameters() if p.requires_grad]


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Of the whole gradient, the same number on every rank."""
    return whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))


class Along:
    """The few parameters of a method's learner, whole on every rank, in the same optimizer and the
    same checkpoints. They stay out of the norm by which the model's gradient is clipped.

    Without a learner every call does nothing.
    """

    def __init__(
        self, learner: Learner | None, optimizer: torch.optim.Optimizer, world: World
    ) -> None:
        self._learner, self._optimizer, self._world = learner, optimizer, world
        self.gradient_norm = 0.0
        if learner is not None:
            learner.module.to(world.device)
            for group in learner.parameter_groups():
                optimizer.add_param_group({**group, "peak": group["lr"]})

    @property
    def curves(self) -> str:
        """What the curves are called: those of a mask stand beside those of the training."""
        return "train" if self._learner is None else "mask"

    @property
    def modules(self) -> dict[str, nn.Module]:
        """For the checkpoints."""
        return {} if self._learner is None else {"learner": self._learner.module}

    def set_rates(self, rate: float, done: int) -> None:
        """The model's, and the learner's own."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
            if self._learner is not None and "peak" in group:
                group["lr"] = group["peak"] * self._learner.rate(done)

    def model_arguments(self, done: int) -> dict[str, Any]:
        """Made anew for every micro-batch: each has a backward pass of its own."""
        return {} if self._learner is None else self._learner.model_arguments(done)

    def finish_gradients(self) -> None:
        """Average them over the ranks, as fully_shard does the model's. The extra loss is the same
        on every rank, so its gradient comes after the mean."""
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
        self.gradient_norm = float(get_total_norm(gradients))

    def after_step(self, step: int) -> None:
        if self._learner is not None:
            self._learner.after_step(step)

    def figures(self) -> dict[str, float]:
        if self._learner is None:
            return {}
        return {"gate_grad_norm": self.gradient_norm, **self._learner.figures()}
