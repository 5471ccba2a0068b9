"""OLMo as a hybrid."""

from transformers import OlmoConfig, OlmoForCausalLM

from bosch.hybrid.models import hybrid_classes

plain_config_class, plain_model_class = OlmoConfig, OlmoForCausalLM
BoschOlmoConfig, BoschOlmoForCausalLM = config_class, model_class = hybrid_classes(
    __name__, OlmoConfig, OlmoForCausalLM
)
# No block_norms: clip_qkv clips queries, keys and values, which rows by themselves are not.
