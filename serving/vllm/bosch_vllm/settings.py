"""Checks vLLM's settings for a hybrid, in the process that the user started."""

from typing import Any

from vllm import envs
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from bosch_vllm.refusals import check_hybrid

NOT_RUN = "this has not been run"
LAYOUTS = ("units", "packed")
BLOCKS_FIRST = ("BLHNC", "BLNHC")  # layouts of the cache in which each block is one piece of memory


class HybridSettings(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        config = vllm_config.model_config.hf_config
        hybrid, num_groups = getattr(config, "bosch", None), config.num_key_value_heads
        check_hybrid(hybrid, config.num_hidden_layers, num_groups)
        layout = vllm_config.additional_config.get("bosch_layout", "units")
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        keeps_all = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        drafts, ranks = vllm_config.speculative_config, parallel.tensor_parallel_size
        quantized = getattr(config, "quantization_config", None) is not None
        shared = "its groups are put in the ranks' order by their plain weights"
        unequal = f"its {num_groups} groups a layer cannot be shared out"
        on_gpus = "vLLM's offload is for GPUs, where nothing of this has run"
        for name, asked, reason in (
            (f"--tensor-parallel-size {ranks}", num_groups % ranks > 0, unequal),
            ("quantized weights on several ranks", quantized and ranks > 1, shared),
            ("--pipeline-parallel-size above 1", parallel.pipeline_parallel_size > 1, NOT_RUN),
            ("drafts other than ngram", drafts and drafts.method != "ngram", NOT_RUN),
            ("a KV connector", vllm_config.kv_transfer_config is not None, on_gpus),
            ("LoRA", vllm_config.lora_config is not None, NOT_RUN),
            ("an fp8 KV cache", cache.cache_dtype.startswith("fp8"), NOT_RUN),
            ("--disable-hybrid-kv-cache-manager", keeps_all, "nothing would be saved"),
            (f"bosch_layout {layout}", layout not in LAYOUTS, "its layouts are units and packed"),
        ):
            if asked:
                raise ValueError(f"bosch_vllm cannot serve a hybrid with {name}: {reason}.")
        if layout == "packed" and current_platform.is_cpu():
            # The backend names no such layout, but its kernels follow strides: tests/serving.
            cache.kv_cache_layout = BLOCKS_FIRST[0]


def why_not_packed(vllm_config: Any) -> str | None:
    """None: the layout is packed, as --additional-config '{"bosch_layout": "packed"}' asks."""
    if vllm_config.additional_config.get("bosch_layout") != "packed":
        return "the default"
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if any(count % ranks for count in vllm_config.model_config.hf_config.bosch["num_full"]):
        return f"packed needs layers whose full groups {ranks} ranks share equally"
    found = vllm_config.cache_config.kv_cache_layout or envs.VLLM_KV_CACHE_LAYOUT
    needed = f"packed needs VLLM_KV_CACHE_LAYOUT={' or '.join(BLOCKS_FIRST)}"
    return None if found in BLOCKS_FIRST else needed
