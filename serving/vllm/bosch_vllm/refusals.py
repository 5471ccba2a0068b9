"""Which vLLM and which folders this plug-in serves. Needs no vLLM."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from operator import attrgetter

RUN_WITH = ("0.31", "0.32")  # minor versions of vLLM that the tests ran with
NEEDED = (
    "vllm:ModelRegistry.register_model",
    "vllm.distributed:get_tensor_model_parallel_rank",
    "vllm.model_executor.layers.attention:Attention.get_kv_cache_spec",
    "vllm.model_executor.models.config:MODELS_CONFIG_MAP",
    "vllm.model_executor.models.config:VerifyAndUpdateConfig",
    "vllm.v1.attention.selector:get_attn_backend",
    "vllm.v1.kv_cache_interface:FullAttentionSpec.is_uniform_with_collection",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec.is_uniform_with_collection",
    "vllm.v1.kv_cache_interface:replace_as",
)


def check_engine(version: str, needed: Sequence[str] = NEEDED) -> str | None:
    """Refuse a vLLM that lacks what the plug-in calls. A warning about one that it never ran with,
    or None."""
    # All that is lacking, so that one message tells what to report.
    lacking = []
    for place in needed:
        module, _, name = place.partition(":")
        try:
            attrgetter(name)(import_module(module))
        except (ImportError, AttributeError):
            lacking.append(f"{module}.{name}")
    run_with = f"bosch_vllm was run with vLLM {', '.join(RUN_WITH)} only, and this is {version}"
    if lacking:
        problem = f"{run_with}, which lacks {', '.join(lacking)}"
        raise ValueError(f"{problem}; install that, or set VLLM_PLUGINS= for models without it.")
    return None if ".".join(version.split(".")[:2]) in RUN_WITH else run_with


def check_hybrid(
    hybrid: Mapping[str, object] | None,
    num_layers: int,
    num_groups: int,
    layer_types: Sequence[str] = (),
) -> None:
    """Refuse a `config.bosch` that another version wrote, or that has nothing on a window."""
    hybrid = hybrid or {}
    num_full, window = hybrid.get("num_full"), hybrid.get("window")
    if (
        not isinstance(num_full, Sequence)
        or len(num_full) != num_layers
        or not all(type(n) is int and 0 <= n <= num_groups for n in num_full)
        or type(window) is not int
        or window < 1
    ):
        problem = f"config.bosch has no window or no numbers of full groups of {num_layers} layers"
        raise ValueError(f"{problem}: another version of bosch-hybrid wrote it. Materialize again.")
    sink = hybrid.get("sink", {"kind": "none"})
    kind = sink.get("kind") if isinstance(sink, Mapping) else None
    if kind not in ("none", "static"):
        problem = f"this hybrid's windows see {sink}; this plug-in serves static sinks, and none"
        raise ValueError(f"{problem}. Use transformers' generate.")
    kinds = layer_types or ["full_attention"] * num_layers
    # Layers with a window of their own are not the mask's: the dense model has those windows too.
    if all(n == num_groups for n, kind in zip(num_full, kinds, strict=True) if "full" in kind):
        problem = "no group of this hybrid is on the window, so nothing would be saved"
        raise ValueError(f"{problem}; serve the model that it was made from.")
