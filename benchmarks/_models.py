"""Models of known shape with random weights, and hybrids whose ratio and window can be changed.

The time of attention depends neither on the weights nor on which groups of a layer are windowed, so
one set of weights serves all ratios.
"""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from bosch.known_models import SHAPES, known_config
from bosch.masks.mask import num_windowed
from bosch.plugins import suggest
from bosch.run.errors import UserError
from bosch.training.model_start import read_config

SIZES = ("Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-30B-A3B")


def read_shape(model: str) -> PretrainedConfig:
    """The config of a known model (`Qwen3-8B`, `Qwen/Qwen3-8B-Base`) or of a folder."""
    if Path(model).is_dir():
        return read_config(Path(model))
    config = known_config(model)
    if config is None:
        raise UserError(
            f"--model {model}: neither a folder nor a known model; {suggest(model, list(SHAPES))}"
        )
    return config


def make_model(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """A model with random weights, created on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    return model.eval()


def set_hybrid(model: PreTrainedModel, ratio: float, window_tokens: int) -> None:
    """Put this share of the groups on the window, as `spread_mask` does. Use new caches."""
    z = spread_mask(ratio, model.config.num_hidden_layers, model.config.num_key_value_heads)
    changes = {"window": window_tokens, "num_full": [sum(row) for row in z]}
    model.config.bosch = {**model.config.bosch, **changes}


def spread_mask(ratio: float, num_layers: int, num_groups: int) -> list[list[int]]:
    """z with the exact budget of a ratio, spread evenly over the layers; full groups come first."""
    budget = num_windowed(ratio, num_layers, num_groups)
    ends = [budget * layer // num_layers for layer in range(num_layers + 1)]
    windowed = [end - begin for begin, end in pairwise(ends)]
    return [[1] * (num_groups - count) + [0] * count for count in windowed]


def random_ids(config: PretrainedConfig, num_tokens: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (1, num_tokens), generator=generator).to(device)
