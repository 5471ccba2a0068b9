"""Qwen2Moe as a hybrid."""

from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = Qwen2MoeConfig, Qwen2MoeForCausalLM
BoschQwen2MoeConfig, BoschQwen2MoeForCausalLM = config_class, model_class = hybrid_classes(
    __name__, Qwen2MoeConfig, Qwen2MoeForCausalLM
)
block_norms = PRE_NORM
served_by_vllm = True
layer_types_suffice = True
