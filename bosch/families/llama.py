"""Llama as a hybrid."""

from transformers import LlamaConfig, LlamaForCausalLM

from bosch.hybrid.models import PRE_NORM, HybridCausalLM, HybridConfig

plain_config_class = LlamaConfig
plain_model_class = LlamaForCausalLM


class BoschLlamaConfig(HybridConfig, LlamaConfig):
    model_type = "bosch_llama"


class BoschLlamaForCausalLM(HybridCausalLM, LlamaForCausalLM):
    config_class = BoschLlamaConfig


config_class = BoschLlamaConfig
model_class = BoschLlamaForCausalLM
block_norms = PRE_NORM
