"""Models of known shape with random weights, and hybrids whose ratio and window can be changed.

The time of attention depends neither on the weights nor on which groups of a layer are windowed, so
one set of weights serves all ratios.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from bosch.hybrid.models import family_of, hybrid_config
from bosch.masks.mask import num_windowed
from bosch.model import LOCAL
from bosch.plugins import suggest
from bosch.run.errors import UserError
from bosch.training.model_start import read_config


def _shape(
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    **others: object,
) -> dict[str, Any]:
    return {
        "vocab_size": 151_936,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        **others,
    }


# From the models' config.json, so that nothing is downloaded.
SHAPES = {
    "Qwen3-1.7B": _shape(2048, 6144, 28, 16, tie_word_embeddings=True),
    "Qwen3-4B": _shape(2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen3-8B": _shape(4096, 12_288, 36, 32),
    "Qwen3-14B": _shape(5120, 17_408, 40, 40),
    "Qwen3-30B-A3B": _shape(
        2048,
        6144,
        48,
        32,
        num_key_value_heads=4,
        max_position_embeddings=40_960,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    # 4 layers of 8 heads, each its own group: small enough for one core of a laptop.
    "mini": _shape(256, 768, 4, 8, vocab_size=1024, head_dim=64),
}


def read_shape(model: str) -> tuple[PretrainedConfig, Path | None]:
    """The config of a known model (`Qwen3-8B`, `Qwen/Qwen3-8B-Base`) or of a folder, and the folder
    if it contains weights.
    """
    folder = Path(model)
    if folder.is_dir():
        has_weights = any(folder.glob("*.safetensors"))
        return read_config(folder), folder if has_weights else None
    name = model.rsplit("/", 1)[-1].removesuffix("-Base")
    known = {shape.lower(): values for shape, values in SHAPES.items()}
    if name.lower() not in known:
        raise UserError(
            f"--model {model}: neither a folder nor a known model; {suggest(name, list(SHAPES))}"
        )
    values = known[name.lower()]
    return (Qwen3MoeConfig if "num_experts" in values else Qwen3Config)(**values), None


def make_dense(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """A model with random weights, created on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    return model.eval()


def make_hybrid(
    config: PretrainedConfig, folder: Path | None, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """A hybrid with the weights of a folder, or with random ones. `set_hybrid` sets its ratio and
    window.
    """
    hybrid = config
    if getattr(config, "bosch", None) is None:
        full = spread_mask(0.0, config.num_hidden_layers, config.num_key_value_heads)
        hybrid = hybrid_config(config, full, window_tokens=1)
    if folder is None:
        return make_dense(hybrid, device, dtype, attention="bosch")
    with torch.device(device):  # for the weights
        model: PreTrainedModel = family_of(hybrid).model_class.from_pretrained(
            folder, config=hybrid, dtype=dtype, **LOCAL
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
