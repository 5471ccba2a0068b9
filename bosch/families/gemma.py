"""Gemma as a hybrid: it scales what it embeds."""

from transformers import GemmaConfig, GemmaForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = GemmaConfig, GemmaForCausalLM
BoschGemmaConfig, BoschGemmaForCausalLM = config_class, model_class = hybrid_classes(
    __name__, GemmaConfig, GemmaForCausalLM
)
block_norms = PRE_NORM
served_by_vllm = True
