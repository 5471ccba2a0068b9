"""Arcee as a hybrid."""

from transformers import ArceeConfig, ArceeForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = ArceeConfig, ArceeForCausalLM
BoschArceeConfig, BoschArceeForCausalLM = config_class, model_class = hybrid_classes(
    __name__, ArceeConfig, ArceeForCausalLM
)
block_norms = PRE_NORM
