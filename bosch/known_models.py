"""The shapes of some models, from their config.json, so that planning a run downloads nothing."""

from typing import Any

COMMON = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}


def _shape(hidden: int, mlp: int, layers: int, heads: int, **others: int) -> dict[str, Any]:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return COMMON | sizes | others


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
OF_30B = {"num_key_value_heads": 4, "max_position_embeddings": 40_960, **EXPERTS}
SHAPES = {
    "Qwen3-0.6B": _shape(1024, 3072, 28, 16, tie_word_embeddings=True),
    "Qwen3-1.7B": _shape(2048, 6144, 28, 16, tie_word_embeddings=True),
    "Qwen3-4B": _shape(2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen3-8B": _shape(4096, 12_288, 36, 32),
    "Qwen3-14B": _shape(5120, 17_408, 40, 40),
    "Qwen3-30B-A3B": _shape(2048, 6144, 48, 32, **OF_30B),
    # 4 layers of 8 heads, each its own group: small enough for one core of a laptop.
    "mini": _shape(256, 768, 4, 8, vocab_size=1024, head_dim=64),
}

# The paper's models, by their ids on the hub.
SIZES = ("1.7B", "8B", "14B", "30B-A3B")
PAPER_MODELS = {f"Qwen/Qwen3-{size}-Base": f"Qwen3-{size}" for size in SIZES}


def known_config(model: str) -> Any:
    """The config of a model above: `Qwen3-8B`, `Qwen/Qwen3-8B-Base`. None: it is not known."""
    from transformers import Qwen3Config, Qwen3MoeConfig  # seconds

    name = model.rsplit("/", 1)[-1].removesuffix("-Base").lower()
    values = {shape.lower(): values for shape, values in SHAPES.items()}.get(name)
    if values is None:
        return None
    return (Qwen3MoeConfig if "num_experts" in values else Qwen3Config)(**values)
