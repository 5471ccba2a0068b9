"""Mixtral as a hybrid."""

from transformers import MixtralConfig, MixtralForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = MixtralConfig, MixtralForCausalLM
BoschMixtralConfig, BoschMixtralForCausalLM = config_class, model_class = hybrid_classes(
    __name__, MixtralConfig, MixtralForCausalLM
)
block_norms = PRE_NORM
served_by_vllm = True
