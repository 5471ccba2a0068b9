"""Llama as a hybrid."""

from transformers import LlamaConfig, LlamaForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = LlamaConfig, LlamaForCausalLM
BoschLlamaConfig, BoschLlamaForCausalLM = config_class, model_class = hybrid_classes(
    __name__, LlamaConfig, LlamaForCausalLM
)
block_norms = PRE_NORM
served_by_vllm = True
kernels_compared = True
