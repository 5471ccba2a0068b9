"""SmolLM3 as a hybrid: some of its layers have no rotary positions."""

from transformers import SmolLM3Config, SmolLM3ForCausalLM

from bosch.hybrid.models import hybrid_classes

plain_config_class, plain_model_class = SmolLM3Config, SmolLM3ForCausalLM
BoschSmolLM3Config, BoschSmolLM3ForCausalLM = config_class, model_class = hybrid_classes(
    __name__, SmolLM3Config, SmolLM3ForCausalLM
)
# No block_norms: rows by themselves would be rotated in every layer.
layer_types_suffice = True
