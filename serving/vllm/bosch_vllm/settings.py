"""Checks vLLM's settings for a hybrid, in the process that the user started."""

from typing import Any

import vllm
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from bosch_vllm.refusals import check_hybrid, check_setting, check_version

NOT_RUN = "this has not been run"


class HybridSettings(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        check_version(vllm.__version__)
        config = vllm_config.model_config.hf_config
        check_hybrid(
            getattr(config, "bosch", None), config.num_hidden_layers, config.num_key_value_heads
        )
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        for name, asked, reason in (
            (
                "--tensor-parallel-size above 1",
                parallel.tensor_parallel_size > 1,
                "ranks would get unequal parts of its full and window groups",
            ),
            ("--pipeline-parallel-size above 1", parallel.pipeline_parallel_size > 1, NOT_RUN),
            ("speculative decoding", vllm_config.speculative_config is not None, NOT_RUN),
            ("LoRA", vllm_config.lora_config is not None, NOT_RUN),
            ("an fp8 KV cache", cache.cache_dtype.startswith("fp8"), NOT_RUN),
            (
                "--disable-hybrid-kv-cache-manager",
                bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
                "that keeps every entry of its window groups, so nothing would be saved",
            ),
        ):
            check_setting(name, asked, reason)
