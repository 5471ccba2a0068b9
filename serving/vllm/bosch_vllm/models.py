"""A stock vLLM model whose layers attend once over their full and once over their window groups.

No code of a family is repeated: the stock model is built, then the `Attention` of each layer is
exchanged for a `HybridAttention`, which has the same call (q, k, v) -> output.
"""

import importlib
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform

from bosch.masks.window import own_window
from bosch_vllm import FAMILIES, STOCK
from bosch_vllm.packing import (
    block_of,
    greatest_unit,
    most_groups,
    order_for_ranks,
    pack_blocks,
    pack_units,
    share_of_dense,
    share_out,
)
from bosch_vllm.settings import (
    HybridSettings,
    allowed_by,
    has_static_sinks,
    is_like_gpus,
    layout_of,
)
from bosch_vllm.sinks import WindowWithSink, add_parameters
from bosch_vllm.specs import BlockAttention

logger = init_logger("vllm.bosch")  # only what is below "vllm" is shown


class HybridAttention(nn.Module):
    """In place of the Attention of one layer, whose KV heads are ordered [full..., window...].

    `first`: the first windowed group of this rank, in a count of the layer's on all ranks. `own`:
    the window that the layer had before, which all its groups keep.
    """

    def __init__(
        self,
        owner: Any,
        pieces: dict[str, int],
        first: int,
        own: int | None,
        are_blocks: bool,
        config: Any,
    ):
        super().__init__()
        stock, hybrid = owner.attn, config.model_config.hf_config.bosch
        self.head_size, self.padded = stock.head_size, _kernel_head_size(stock)
        per_kv = stock.num_heads // stock.num_kv_heads
        has_sinks = own is None and has_static_sinks(hybrid)
        like_gpus = is_like_gpus(config)
        self.parts, done = nn.ModuleList(), first
        for name, size in pieces.items():
            is_window = name.startswith("window")
            make_attention = partial(
                BlockAttention,
                head_size=self.padded,
                scale=stock.impl.scale,
                num_kv_heads=size,
                cache_config=config.cache_config,
                quant_config=stock.quant_config,
                # Like ours, it counts the token itself.
                per_layer_sliding_window=(own or hybrid["window"]) if is_window else None,
                prefix=f"{stock.layer_name}.{name}",  # one integer between dots at most
                block=block_of(name) if are_blocks else None,
            )
            if is_window and has_sinks:
                part: nn.Module = WindowWithSink(
                    owner,
                    make_attention,
                    groups=slice(done, done + size),
                    repeats=per_kv,
                    padded=self.padded,
                    cache_dtype=config.cache_config.cache_dtype,
                    like_gpus=like_gpus,
                )
            else:
                part = make_attention(num_heads=size * per_kv)
            self.parts.append(part)
            done += size if is_window else 0
        self.kv_sizes = [size * self.head_size for size in pieces.values()]
        self.q_sizes = [size * per_kv for size in self.kv_sizes]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # The heads of each part, in their order; the outputs come back in the same order, so the
        # output projection sees heads as the stock attention would have given them.
        queries, keys = query.split(self.q_sizes, -1), key.split(self.kv_sizes, -1)
        values, pad = value.split(self.kv_sizes, -1), self._pad
        found = [
            self._narrow(part(pad(q), pad(k), pad(v)))
            for part, q, k, v in zip(self.parts, queries, keys, values, strict=True)
        ]
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
    block, tokens = config.cache_config.block_size, config.model_config.max_model_len
    ranks, rank = config.parallel_config.tensor_parallel_size, get_tensor_model_parallel_rank()
    shares, groups = share_out(hybrid["num_full"], ranks), num_groups // ranks
    has_sinks = has_static_sinks(hybrid)
    owns = [own_window(hf_config, layer) for layer in range(hf_config.num_hidden_layers)]
    per_kv = hf_config.num_attention_heads // num_groups
    most = most_groups(per_kv) if has_sinks and is_like_gpus(config) else None
    layout, why = layout_of(config)
    if layout == "units":
        packing = pack_units(shares[rank], groups, greatest_unit(shares, groups, most))
    else:
        packing = pack_blocks(shares[rank], groups, hybrid["window"] - 1 + block, tokens, most)
    # Modules of one size are for vLLM to group.
    are_blocks = layout == "packed" and len({n for pieces in packing for n in pieces.values()}) > 1
    built = config.compilation_config.static_forward_context
    for index, layer in enumerate(model.model.layers):
        owner, stock = layer.self_attn, layer.self_attn.attn
        if not stock.attn_backend.supports_block_size(block):
            problem = f"--block-size {block} does not fit {stock.attn_backend.get_name()}"
            raise ValueError(f"{problem}; leave it out, and the kernels get one that fits.")
        # vLLM keeps each attention by its name, for its cache: the stock one is to have none.
        del built[stock.layer_name]
        # Sinks are in the order of the whole layer's window groups, of which this rank has those
        # behind the earlier ranks' (`for_ranks`).
        first = sum(groups - share[index] for share in shares[:rank])
        owner.attn = HybridAttention(owner, packing[index], first, owns[index], are_blocks, config)
        windowed = num_groups - hybrid["num_full"][index]
        if windowed and has_sinks and owns[index] is None:
            add_parameters(owner, windowed, owner.attn.head_size)
    if layout == "packed":
        # vLLM chose each attention's backend as it was built, and the cache's layout before.
        ours = [part for part in built.values() if isinstance(part, BlockAttention)]
        asked = config.cache_config.kv_cache_layout
        for backend in {part.attn_backend for part in ours}:
            if (allowed := allowed_by(backend)) is not None and asked not in allowed:
                problem = f"bosch_layout packed needs {asked}, and {backend.get_name()}"
                raise ValueError(
                    f"{problem} has {', '.join(allowed)}: set bosch_layout units (docs/serving.md)."
                )
    # vLLM splits a block of windows whose first module is not its smallest.
    in_order = sorted(built.items(), key=lambda item: getattr(item[1], "num_kv_heads", 0))
    # The same dict in another order: vLLM holds on to it.
    built.clear()
    built.update(in_order)
    logger.info(
        "bosch: layout %s (%s), %d attention modules, %.3f of the dense KV bytes at %d tokens",
        layout,
        why,
        sum(map(len, packing)),
        share_of_dense(hybrid["num_full"], num_groups, hybrid["window"], tokens, owns),
        tokens,
    )


def for_ranks(
    weights: Iterable[tuple[str, Tensor]], config: Any, ranks: int
) -> Iterator[tuple[str, Tensor]]:
    """Groups of each layer in the order in which tensor parallelism gives each rank its share. It
    cuts
    the heads into equal pieces in their order, but a rank needs full and window groups of its own:

        file, 2 full of 4    F0 F1 W0 W1
        for two ranks        F0 W0 | F1 W1
    """
    hybrid, num_groups = config.bosch, config.num_key_value_heads
    shares = share_out(hybrid["num_full"], ranks)
    orders = [
        order_for_ranks(num_full, [share[layer] for share in shares], num_groups)
        for layer, num_full in enumerate(hybrid["num_full"])
    ]
    pattern = re.compile(r"layers\.(\d+)\.self_attn\.([qkvo])_proj\.(weight|bias)$")
    for name, weight in weights:
        found = pattern.search(name)
        if found and (found[2], found[3]) != ("o", "bias"):
            dim = 1 if found[2] == "o" else 0
            heads = weight.unflatten(dim, (num_groups, -1))
            order = torch.tensor(orders[int(found[1])], device=weight.device)
            weight = heads.index_select(dim, order).flatten(dim, dim + 1)
        yield name, weight


def __getattr__(name: str) -> Any:
    """The class of an architecture, made when it is asked for."""
    if (place := FAMILIES.get(name)) is None:
        raise AttributeError(name)
    module, class_name = place.split(":")
    stock = getattr(importlib.import_module(f"{STOCK}.{module}"), class_name)

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:  # noqa: N807
        stock.__init__(self, vllm_config=vllm_config, prefix=prefix)
        split_attention(self, vllm_config)

    # As they are read, and not in the loaded model: the stock loader gives each rank its piece.
    def load_weights(self: Any, weights: Any) -> Any:
        ranks = get_tensor_model_parallel_world_size()
        if ranks > 1:
            weights = for_ranks(weights, self.config, ranks)
        return stock.load_weights(self, weights)

    members = {"__init__": __init__, "load_weights": load_weights, "__module__": __name__}
    globals()[name] = type(name, (stock,), members)
    return globals()[name]
