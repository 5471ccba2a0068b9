"""Which weights are trained (all, some of them, or narrow matrices beside frozen ones: LoRA), and
the AdamW that changes them.

peft would rename the frozen weights, which loading, checkpoints and export look up by name; a hook
does not. An export adds the products to the weights, so that its folder looks like any other.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from transformers import PretrainedConfig, PreTrainedModel

from bosch.config import TrainConfig
from bosch.hybrid.sinks import is_sink
from bosch.run.fingerprint import fingerprint
from bosch.training.parallel import whole

LORA_SCALE = 2.0  # of the product that is added to a weight
DOWN, UP = "lora_down.weight", "lora_up.weight"
EPSILON = 1e-8  # of AdamW


def choose_trained(model: PreTrainedModel, trained: str, lora_rank: int) -> None:
    """On the meta device. `trained` and `lora_rank` are those of TrainConfig."""
    has_window = windowed_layers(model.config)
    for name, parameter in model.named_parameters():
        is_attention = ".self_attn." in name
        parameter.requires_grad_(
            {
                "all": True,
                "attention": is_attention,
                "windowed-attention": is_attention and has_window[int(name.split(".")[2])],
                "norms": "norm" in name,
                "lora": False,
            }[trained]
        )
    if trained == "lora":
        for module in list(model.get_submodule("model.layers").modules()):
            if type(module) is nn.Linear:
                add_lora(module, lora_rank)


def windowed_layers(config: PretrainedConfig) -> list[bool]:
    """Of each layer, whether it has groups with a window. Where none has, as in the control and a
    dense model, all count."""
    hybrid = getattr(config, "bosch", None)
    num_full = hybrid["num_full"] if hybrid else []
    found = [count < config.num_key_value_heads for count in num_full]
    return found if any(found) else [True] * config.num_hidden_layers


# ------------------------------------------------------------------------------------------- AdamW


def make_optimizer(model: nn.Module, settings: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, but not on norms, biases and sinks.

    Call it before any forward: after one, the root module holds other parameters than the sharded
    ones, which the optimizer needs.
    """
    parameters = trained_parameters(model)
    # With bf16 weights and a learning rate of 1e-5 most updates are rounded away: AdamW changes
    # only 14 % of the weights in 50 steps (measured).
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    constants = {p for name, p in model.named_parameters() if p.ndim < 2 or is_sink(name)}
    decayed = [p for p in parameters if p not in constants]
    others = [p for p in parameters if p in constants]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
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


# -------------------------------------------------------------------------------------------- LoRA


def add_lora(linear: Any, rank: int) -> None:
    dtype = linear.weight.dtype
    with torch.device("meta"):
        linear.lora_down = nn.Linear(linear.in_features, rank, bias=False, dtype=dtype)
        linear.lora_up = nn.Linear(rank, linear.out_features, bias=False, dtype=dtype)

    def add_product(linear: Any, given: tuple[Tensor], output: Tensor) -> Tensor:
        return output + LORA_SCALE * linear.lora_up(linear.lora_down(given[0]))

    linear.register_forward_hook(add_product)


def first_lora_values(name: str, shape: torch.Size) -> Tensor | None:
    """The same on all ranks; the products begin as zeros. None for a weight of the model itself."""
    if name.endswith(UP):
        return torch.zeros(shape)
    if not name.endswith(DOWN):
        return None
    generator = torch.Generator().manual_seed(int(fingerprint(name)[:12], 16))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def is_lora(name: str) -> bool:
    return name.endswith((DOWN, UP))


def lora_of(name: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """The two matrices whose product is added to a weight, the left one first."""
    prefix = name.removesuffix("weight")
    up = tensors.get(prefix + UP)
    return None if up is None else (up, tensors[prefix + DOWN])
