"""Ernie 4.5 as a hybrid."""

from transformers import Ernie4_5Config, Ernie4_5ForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = Ernie4_5Config, Ernie4_5ForCausalLM
BoschErnie4_5Config, BoschErnie4_5ForCausalLM = config_class, model_class = hybrid_classes(
    __name__, Ernie4_5Config, Ernie4_5ForCausalLM
)
block_norms = PRE_NORM
served_by_vllm = True
