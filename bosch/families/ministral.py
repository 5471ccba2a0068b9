"""Ministral as a hybrid."""

from transformers import MinistralConfig, MinistralForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = MinistralConfig, MinistralForCausalLM
BoschMinistralConfig, BoschMinistralForCausalLM = config_class, model_class = hybrid_classes(
    __name__, MinistralConfig, MinistralForCausalLM
)
block_norms = PRE_NORM
served_by_vllm = True
layer_types_suffice = True
