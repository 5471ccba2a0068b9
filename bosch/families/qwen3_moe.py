"""Qwen3Moe as a hybrid."""

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = Qwen3MoeConfig, Qwen3MoeForCausalLM
BoschQwen3MoeConfig, BoschQwen3MoeForCausalLM = config_class, model_class = hybrid_classes(
    __name__, Qwen3MoeConfig, Qwen3MoeForCausalLM
)
block_norms = PRE_NORM
served_by_vllm = True
kernels_compared = True
