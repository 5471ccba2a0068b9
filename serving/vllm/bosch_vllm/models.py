"""A stock vLLM model whose layers attend once over their full and once over their window groups.

No code of a family is repeated: the stock model is built, then the `Attention` of each layer is
exchanged for a `HybridAttention`, which has the same call (q, k, v) -> output.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform

from bosch_vllm import FAMILIES
from bosch_vllm.packing import pack_blocks, pack_units, share_of_dense
from bosch_vllm.settings import HybridSettings, why_not_packed
from bosch_vllm.sinks import WindowWithSink, add_parameters

logger = init_logger("vllm.bosch")  # only what is below "vllm" is shown


class HybridAttention(nn.Module):
    """In place of the Attention of one layer, whose KV heads are ordered [full..., window...]."""

    def __init__(self, owner: Any, pieces: dict[str, int], hybrid: Any, config: Any):
        super().__init__()
        stock = owner.attn
        self.head_size, self.padded = stock.head_size, _kernel_head_size(stock)
        per_kv = stock.num_heads // stock.num_kv_heads
        has_sinks = "sink" in hybrid and hybrid["sink"]["kind"] == "static"
        self.parts, done = nn.ModuleList(), 0
        for name, size in pieces.items():
            is_window = name.startswith("window")
            settings = {
                "num_heads": size * per_kv,
                "head_size": self.padded,
                "scale": stock.impl.scale,
                "num_kv_heads": size,
                "cache_config": config.cache_config,
                "quant_config": stock.quant_config,
                # Like ours, it counts the token itself.
                "per_layer_sliding_window": hybrid["window"] if is_window else None,
                "prefix": f"{stock.layer_name}.{name}",  # one integer between dots at most
            }
            if is_window and has_sinks:
                groups = slice(done, done + size)
                self.parts.append(WindowWithSink(owner, groups, settings, self.padded))
            else:
                self.parts.append(Attention(**settings))
            done += size if is_window else 0
        if done and has_sinks:
            add_parameters(owner, done, self.head_size)
        self.kv_sizes = [size * self.head_size for size in pieces.values()]
        self.q_sizes = [size * per_kv for size in self.kv_sizes]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cuts = query.split(self.q_sizes, -1), key.split(self.kv_sizes, -1)
        each = zip(self.parts, *cuts, value.split(self.kv_sizes, -1), strict=True)
        pad = self._pad
        found = [self._narrow(part(pad(q), pad(k), pad(v))) for part, q, k, v in each]
        return torch.cat(found, -1)

    def _pad(self, x: Tensor) -> Tensor:
        if self.padded == self.head_size:
            return x.contiguous()
        heads = x.unflatten(-1, (-1, self.head_size))
        return nn.functional.pad(heads, (0, self.padded - self.head_size)).flatten(-2)

    def _narrow(self, x: Tensor) -> Tensor:
        if self.padded == self.head_size:
            return x
        return x.unflatten(-1, (-1, self.padded))[..., : self.head_size].flatten(-2)


def _kernel_head_size(stock: Any) -> int:
    """The CPU kernels have no heads of 16 (the embedded tiny models): zeros fill them up to 32."""
    if not current_platform.is_cpu():
        return int(stock.head_size)
    return min(n for n in stock.attn_backend.get_supported_head_sizes() if n >= stock.head_size)


def split_attention(model: Any, config: Any) -> None:
    HybridSettings.verify_and_update_config(config)  # again: vLLM has settled its settings since
    hf_config = config.model_config.hf_config
    hybrid, num_groups = hf_config.bosch, hf_config.num_key_value_heads
    num_full, window = hybrid["num_full"], hybrid["window"]
    block, tokens = config.cache_config.block_size, config.model_config.max_model_len
    reason = why_not_packed(config)
    if reason:
        packing = pack_units(num_full, num_groups)
    else:
        packing = pack_blocks(num_full, num_groups, window - 1 + block, tokens)
    built = config.compilation_config.static_forward_context
    for layer, pieces in zip(model.model.layers, packing, strict=True):
        stock = layer.self_attn.attn
        if not stock.attn_backend.supports_block_size(block):
            problem = f"--block-size {block} does not fit {stock.attn_backend.get_name()}"
            raise ValueError(f"{problem}; leave it out, and the kernels get one that fits.")
        del built[stock.layer_name]
        layer.self_attn.attn = HybridAttention(layer.self_attn, pieces, hybrid, config)
    logger.info(
        "bosch: layout %s, %d attention modules, %.3f of the dense KV bytes at %d tokens",
        f"units ({reason})" if reason else "packed",
        sum(map(len, packing)),
        share_of_dense(num_full, num_groups, window, tokens),
        tokens,
    )


def __getattr__(name: str) -> Any:
    """The class of an architecture, made when it is asked for."""
    if name not in FAMILIES:
        raise AttributeError(name)
    module, class_name = FAMILIES[name].split(":")
    stock = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), class_name)

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:  # noqa: N807
        stock.__init__(self, vllm_config=vllm_config, prefix=prefix)
        split_attention(self, vllm_config)

    globals()[name] = type(name, (stock,), {"__init__": __init__, "__module__": __name__})
    return globals()[name]
