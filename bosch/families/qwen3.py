"""Qwen3 as a hybrid."""

from transformers import Qwen3Config, Qwen3ForCausalLM

from bosch.hybrid.models import PRE_NORM, HybridCausalLM, HybridConfig

plain_config_class = Qwen3Config
plain_model_class = Qwen3ForCausalLM


class BoschQwen3Config(HybridConfig, Qwen3Config):
    model_type = "bosch_qwen3"


class BoschQwen3ForCausalLM(HybridCausalLM, Qwen3ForCausalLM):
    config_class = BoschQwen3Config


config_class = BoschQwen3Config
model_class = BoschQwen3ForCausalLM
block_norms = PRE_NORM
