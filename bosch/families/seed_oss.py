"""Seed-OSS as a hybrid."""

from transformers import SeedOssConfig, SeedOssForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = SeedOssConfig, SeedOssForCausalLM
BoschSeedOssConfig, BoschSeedOssForCausalLM = config_class, model_class = hybrid_classes(
    __name__, SeedOssConfig, SeedOssForCausalLM
)
block_norms = PRE_NORM
