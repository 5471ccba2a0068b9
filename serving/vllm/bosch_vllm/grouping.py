"""vLLM's grouping of modules of unequal size pads them, or fails; those of the layout "packed" are
grouped as their names say. This replaces one private function; all else goes to vLLM's own.
"""

from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

from bosch_vllm.sinks import TWIN

stock = kv_cache_utils.get_kv_cache_groups


class ByOwner(dict[str, Any]):
    """Modules that read another's cache (sinks.py) have its spec and take no bytes."""

    def __missing__(self, module: str) -> Any:
        owner = module.removesuffix(TWIN)
        if owner == module:
            raise KeyError(module)
        return self[owner]


def get_kv_cache_groups(config: Any, specs: dict[str, Any]) -> list[Any]:
    blocks: dict[str, dict[str, Any]] = {}
    for module, spec in specs.items():
        blocks.setdefault(module.rpartition(".")[2], {})[module] = spec
    if not all("_block" in block for block in blocks):
        return list(stock(config, specs))
    unite = UniformTypeKVCacheSpecs.from_specs
    uniform = {block: unite(ByOwner(held)) for block, held in blocks.items()}
    return [KVCacheGroupSpec(list(held), uniform[block]) for block, held in blocks.items()]


kv_cache_utils.get_kv_cache_groups = get_kv_cache_groups
