"""Qwen2 as a hybrid."""

from transformers import Qwen2Config, Qwen2ForCausalLM

from bosch.hybrid.models import PRE_NORM, HybridCausalLM, HybridConfig

plain_config_class = Qwen2Config
plain_model_class = Qwen2ForCausalLM


class BoschQwen2Config(HybridConfig, Qwen2Config):
    model_type = "bosch_qwen2"


class BoschQwen2ForCausalLM(HybridCausalLM, Qwen2ForCausalLM):
    config_class = BoschQwen2Config


config_class = BoschQwen2Config
model_class = BoschQwen2ForCausalLM
block_norms = PRE_NORM
