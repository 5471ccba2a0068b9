"""Tiny random models of every family, made from a config: nothing is downloaded."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import Cache, PreTrainedModel

from bosch.attention.cache import held_tensors
from bosch.hybrid.conversion import convert, inverse, plain_config
from bosch.hybrid.models import family_of
from bosch.plugins import list_plugins, load_plugin, own_files

FAMILIES = list_plugins("bosch.families")
# Every run takes these, and families of one's own, through all tests of families, and the others
# through those of tests/contracts/test_every_family.py alone; `make slow` takes all through all.
USUAL = ("llama", "mistral", "olmo2", "qwen2", "qwen3", "qwen3_moe")

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

# What single families need besides, or else would not compute as their real models do.
FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 3, "sliding_window": 24}
SPECIAL: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": True, "logit_scale": 0.3},
    "cohere2": FULL,
    "exaone4": {"layer_types": FULL["layer_types"], "sliding_window_pattern": None},
    "gemma3_text": FULL,
    "granite": {
        "attention_multiplier": 0.1,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
    },
    "helium": {"head_dim": 8},
    "ministral": FULL,
    "mixtral": {"num_local_experts": 4},
    "olmo": {"clip_qkv": 2.0},
    "olmo3": FULL,
    "olmoe": {"clip_qkv": 2.0},
    "qwen2_moe": {"shared_expert_intermediate_size": 48},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
}


def family_parameters(*others: Any) -> list[Any]:
    """pytest's parameters: each family with these, slow if neither usual nor of one's own."""
    fast = {name for name in FAMILIES if name in USUAL or own_files(("bosch.families", name))}
    marks = {name: () if name in fast else (pytest.mark.slow,) for name in FAMILIES}
    return [pytest.param(name, *others, marks=marks[name]) for name in FAMILIES]


def families_with(others: Sequence[Any], step: int) -> list[Any]:
    """pytest's parameters: each family with each of these. In every run Qwen3, and families of
    one's own, meet all of them, and each usual family every `step`-th, from another one on; `make
    slow` has the whole product."""
    params = []
    for offset, family in enumerate(family_parameters()):
        name = family.values[0]
        meets_all = name not in USUAL or name == "qwen3"
        for number, other in enumerate(others):
            thinned_out = not meets_all and (number + offset) % step
            marks = (pytest.mark.slow,) if family.marks or thinned_out else ()
            given = other if isinstance(other, tuple) else (other,)
            params.append(pytest.param(name, *given, marks=marks))
    return params


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
        for name, value in {**TINY, **SPECIAL.get(family, {}), **changes}.items()
        if name in fields or name in changes
    }
    torch.manual_seed(seed)
    config = module.plain_config_class(**values)
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    model: PreTrainedModel = module.plain_model_class(config)
    return model.eval()


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """Biases and norms start as 0 and 1: other numbers, or a permutation would not show in them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "norm" in name:  # some norms have a weight for each head
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


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
