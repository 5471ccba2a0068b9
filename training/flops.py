"""FLOPs of a training step, from which its share of the device's peak (MFU) is computed.

    FLOPs of a batch = (6 * N - 2 * F) * tokens + 12 * head size * pairs

N counts the weights used in products: the head and the active experts, but not the embedding
lookup. F counts the frozen ones of these, whose gradients are not computed.
A pair is one query of one head that sees one key; windows and ends of documents limit them.
Recomputation to save memory does not count.
"""

import torch
from transformers import PretrainedConfig, PreTrainedModel

from bosch.hybrid.conversion import head_size

# Dense bf16 FLOPs per second, from the data sheets, by a part of the device's name.
PEAK_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,  # GH200 too
    "B200": 2250e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """FLOPs per second of one device in bf16. None: not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def count_active_weights(model: PreTrainedModel, only_frozen: bool = False) -> int:
    """N of a model, or F; it may be on the meta device or sharded."""
    config = model.config
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    num_experts = getattr(config, "num_experts", None) or 1
    count = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or ("embed_tokens" in name and not tied):
            continue
        if only_frozen and parameter.requires_grad:
            continue
        if ".experts." in name:
            count += parameter.numel() * config.num_experts_per_tok // num_experts
        else:
            count += parameter.numel()
    return count


def visible_pairs(length: int, window: int | None) -> int:
    """Of one head and one document. A query sees `window` keys up to its own; None: all of them."""
    most = length if window is None else min(window, length)
    return most * (most + 1) // 2 + (length - most) * most


def training_flops(
    config: PretrainedConfig, num_weights: int, lengths: list[int], num_frozen: int = 0
) -> int:
    """Forward and backward pass over documents of these lengths."""
    groups = config.num_key_value_heads
    hybrid = getattr(config, "bosch", None)
    num_full = hybrid["num_full"] if hybrid else [groups] * config.num_hidden_layers
    full_heads = sum(num_full) * (config.num_attention_heads // groups)
    windowed_heads = config.num_hidden_layers * config.num_attention_heads - full_heads
    window = hybrid["window"] if hybrid else None
    pairs = sum(
        full_heads * visible_pairs(length, None) + windowed_heads * visible_pairs(length, window)
        for length in lengths
    )
    return (6 * num_weights - 2 * num_frozen) * sum(lengths) + 12 * head_size(config) * pairs
