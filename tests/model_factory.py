"""Tiny random models of every family, made from a config: nothing is downloaded."""

import dataclasses
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from bosch.attention.cache import held_tensors
from bosch.hybrid.conversion import convert, inverse, plain_config
from bosch.hybrid.models import family_of
from bosch.plugins import list_plugins, load_plugin

FAMILIES = list_plugins("bosch.families")

# Each family takes the fields that its config has. Weights are large, so that attention changes the
# logits.
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

# Layers of the tiny model: mixed, all windowed, mixed the other way round.
MIXED = ((1, 0, 1, 0), (0, 0, 0, 0), (0, 1, 1, 1))


def tiny_model(
    family: str, seed: int = 0, attention: str = "bosch", **changes: Any
) -> PreTrainedModel:
    """A plain model of a family, in evaluation mode; `changes` go into its config."""
    module = load_plugin("bosch.families", family)
    fields = {field.name for field in dataclasses.fields(module.plain_config_class)}
    values = {
        name: value
        for name, value in {**TINY, **changes}.items()
        if name in fields or name in changes
    }
    torch.manual_seed(seed)
    config = module.plain_config_class(**values)
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    model: PreTrainedModel = module.plain_model_class(config)
    return model.eval()


def undeploy(model: PreTrainedModel) -> PreTrainedModel:
    """The plain model that a hybrid was made from, in memory."""
    plain_class = family_of(model.config).plain_model_class
    permutation = inverse(model.config.bosch["permutation"])
    return convert(model, plain_class, plain_config(model.config), permutation)


def random_tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids that are never the padding token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, TINY["vocab_size"], (batch, length), generator=generator)


def assert_close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def packed_positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def same_mask(bit: int, model: PreTrainedModel) -> list[list[int]]:
    return [[bit] * model.config.num_key_value_heads for _ in range(model.config.num_hidden_layers)]


def kv_entries(cache: Cache) -> list[int]:
    """Live entries of each layer, one per position and KV head (of one batch row)."""
    return [
        sum(x.shape[1] * x.shape[2] for x in held_tensors(layer)) // 2 for layer in cache.layers
    ]


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = model(ids, **kwargs).logits
    return out


def generate_anew(model: PreTrainedModel, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The text and greedy tokens after it, each computed from the whole text without a cache."""
    for _ in range(num_tokens):
        best = logits(model, ids, use_cache=False)[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], dim=1)
    return ids
