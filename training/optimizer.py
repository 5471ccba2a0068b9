"""AdamW over sharded fp32 parameters, and over what a method learns along with a model."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from bosch.method import Learner
from bosch.training.parallel import World, whole

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


# A method's learner has a few parameters, whole on every rank, in the same optimizer and the same
# checkpoints. They stay out of the norm by which the model's gradient is clipped.


def add_learner(optimizer: torch.optim.Optimizer, learner: Learner, world: World) -> None:
    learner.module.to(world.device)
    for group in learner.parameter_groups():
        optimizer.add_param_group({**group, "peak": group["lr"]})


def set_rates(
    optimizer: torch.optim.Optimizer, rate: float, learner: Learner | None, done: int
) -> None:
    """The model's, and the learner's own."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        if learner is not None and "peak" in group:
            group["lr"] = group["peak"] * learner.rate(done)


def finish_gradients(learner: Learner, world: World) -> float:
    """Average them over the ranks, as fully_shard does the model's; their norm. The extra loss is
    the same on every rank, so its gradient comes after the mean."""
    for parameter in learner.module.parameters():
        if parameter.grad is None:  # no gate was between its ends
            parameter.grad = torch.zeros_like(parameter)
        if world.size > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size
    learner.extra_loss().backward()
    return float(gradient_norm(learner.module.parameters()))
