"""GLM as a hybrid: a part of each head is rotated."""

from transformers import GlmConfig, GlmForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = GlmConfig, GlmForCausalLM
BoschGlmConfig, BoschGlmForCausalLM = config_class, model_class = hybrid_classes(
    __name__, GlmConfig, GlmForCausalLM
)
block_norms = PRE_NORM
served_by_vllm = True
