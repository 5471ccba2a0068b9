"""Qwen3 as a hybrid."""

from transformers import Qwen3Config, Qwen3ForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = Qwen3Config, Qwen3ForCausalLM
BoschQwen3Config, BoschQwen3ForCausalLM = config_class, model_class = hybrid_classes(
    __name__, Qwen3Config, Qwen3ForCausalLM
)
block_norms = PRE_NORM
served_by_vllm = True
kernels_compared = True
layer_types_suffice = True
