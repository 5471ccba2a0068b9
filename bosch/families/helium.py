"""Helium as a hybrid."""

from transformers import HeliumConfig, HeliumForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = HeliumConfig, HeliumForCausalLM
BoschHeliumConfig, BoschHeliumForCausalLM = config_class, model_class = hybrid_classes(
    __name__, HeliumConfig, HeliumForCausalLM
)
block_norms = PRE_NORM
served_by_vllm = True
