"""Qwen3Moe as a hybrid."""

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bosch.hybrid.models import PRE_NORM, HybridCausalLM, HybridConfig

plain_config_class = Qwen3MoeConfig
plain_model_class = Qwen3MoeForCausalLM


class BoschQwen3MoeConfig(HybridConfig, Qwen3MoeConfig):
    model_type = "bosch_qwen3_moe"


class BoschQwen3MoeForCausalLM(HybridCausalLM, Qwen3MoeForCausalLM):
    config_class = BoschQwen3MoeConfig


config_class = BoschQwen3MoeConfig
model_class = BoschQwen3MoeForCausalLM
block_norms = PRE_NORM
