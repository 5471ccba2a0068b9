"""Mistral as a hybrid."""

from transformers import MistralConfig, MistralForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = MistralConfig, MistralForCausalLM
BoschMistralConfig, BoschMistralForCausalLM = config_class, model_class = hybrid_classes(
    __name__, MistralConfig, MistralForCausalLM
)
block_norms = PRE_NORM
served_by_vllm = True
kernels_compared = True
