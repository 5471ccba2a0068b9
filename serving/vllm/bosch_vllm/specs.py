"""Which modules of the layout "packed" share a block of memory, said in vLLM's public way: each
module has a KV cache spec of its own class, and specs tell vLLM which of them go together.

A class inherits the manager of the class that it extends, so none is registered: the first that
registers one before vLLM's own would keep vLLM from registering them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, replace_as


@dataclass(frozen=True, kw_only=True)
class FullBlock(FullAttentionSpec):
    block: str = ""

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, Any]) -> bool:
        """Whether these modules share this one's block of memory."""
        return all(getattr(spec, "block", None) == self.block for spec in kv_cache_specs.values())


@dataclass(frozen=True, kw_only=True)
class WindowBlock(SlidingWindowSpec):
    block: str = ""

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, Any]) -> bool:
        """As in FullBlock."""
        return all(getattr(spec, "block", None) == self.block for spec in kv_cache_specs.values())


class BlockAttention(Attention):
    """`block`: the name of its block of memory; None: vLLM decides."""

    def __init__(self, *, block: str | None, **settings: Any):
        super().__init__(**settings)
        self.block = block

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)
        if self.block is None:
            return spec
        kind = WindowBlock if isinstance(spec, SlidingWindowSpec) else FullBlock
        return replace_as(spec, kind, block=self.block)
