"""Mistral as a hybrid."""

from transformers import MistralConfig, MistralForCausalLM

from bosch.hybrid.models import PRE_NORM, HybridCausalLM, HybridConfig

plain_config_class = MistralConfig
plain_model_class = MistralForCausalLM


class BoschMistralConfig(HybridConfig, MistralConfig):
    model_type = "bosch_mistral"


class BoschMistralForCausalLM(HybridCausalLM, MistralForCausalLM):
    config_class = BoschMistralConfig


config_class = BoschMistralConfig
model_class = BoschMistralForCausalLM
block_norms = PRE_NORM
