"""StarCoder2 as a hybrid."""

from transformers import Starcoder2Config, Starcoder2ForCausalLM

from bosch.hybrid.models import PRE_NORM, hybrid_classes

plain_config_class, plain_model_class = Starcoder2Config, Starcoder2ForCausalLM
BoschStarcoder2Config, BoschStarcoder2ForCausalLM = config_class, model_class = hybrid_classes(
    __name__, Starcoder2Config, Starcoder2ForCausalLM
)
block_norms = PRE_NORM
