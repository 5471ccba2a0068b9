"""Qwen2 as a hybrid."""

from transformers import Qwen2Config, Qwen2ForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = Qwen2Config, Qwen2ForCausalLM
BoschQwen2Config, BoschQwen2ForCausalLM = config_class, model_class = hybrid_classes(
    __name__, Qwen2Config, Qwen2ForCausalLM
)
block_norms = PRE_NORM
served_by_vllm = True
kernels_compared = True
layer_types_suffice = True
