"""EXAONE 4 as a hybrid: norms after attention and MLP."""

from transformers import Exaone4Config, Exaone4ForCausalLM

from bosch.hybrid.models import hybrid_classes

plain_config_class, plain_model_class = Exaone4Config, Exaone4ForCausalLM
BoschExaone4Config, BoschExaone4ForCausalLM = config_class, model_class = hybrid_classes(
    __name__, Exaone4Config, Exaone4ForCausalLM
)
# No block_norms: beside layers with windows, its full layers have no rotary positions.
served_by_vllm = True
