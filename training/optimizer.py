"""AdamW for sharded fp32 parameters, and for what a method learns together with the model."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from bosch.config import TrainConfig
from bosch.method import Learner
from bosch.training.parallel import World, whole

EPSILON = 1e-8


def make_optimizer(model: nn.Module, settings: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, but not on norms and biases.

    Call it before any forward: after one, the root module holds other parameters than the sharded
    ones, which the optimizer needs.
    """
    parameters = trained_parameters(model)
    for parameter in parameters:
        # With bf16 weights and a learning rate of 1e-5 most updates are rounded away: AdamW changes
        # only 14 % of the weights in 50 steps (measured).
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
    """In the model's order: the last bit of the gradient norm depends on it."""
    return [p for p in model.parameters() if p.requires_grad]


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Norm of the whole gradient, the same number on every rank."""
    return whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))


# A method's learner has a few parameters, not sharded, in the same optimizer and checkpoints. They
# do not count in the norm by which the model's gradient is clipped.


def add_learner(optimizer: torch.optim.Optimizer, learner: Learner, world: World) -> None:
    learner.module.to(world.device)
    for group in learner.parameter_groups():
        optimizer.add_param_group({**group, "peak": group["lr"]})


def set_rates(
    optimizer: torch.optim.Optimizer, rate: float, learner: Learner | None, done: int
) -> None:
    """Learning rates of the model and of the learner, after `done` steps."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        if learner is not None and "peak" in group:
            group["lr"] = group["peak"] * learner.rate(done)


def finish_gradients(learner: Learner, world: World) -> float:
    """Average the learner's gradients over the ranks, as fully_shard does the model's, and return
    their norm. The gradient of the extra loss, equal on all ranks, is added after the mean."""
    for parameter in learner.module.parameters():
        if parameter.grad is None:  # every gate was at 0 or 1
            parameter.grad = torch.zeros_like(parameter)
        if world.size > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size
    learner.extra_loss().backward()
    return float(gradient_norm(learner.module.parameters()))
