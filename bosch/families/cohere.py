"""Cohere (Command R) as a hybrid: attention and MLP side by side, and its logits are scaled."""

from typing import Any

from transformers import CohereConfig, CohereForCausalLM

from bosch.hybrid.models import hybrid_classes

plain_config_class, plain_model_class = CohereConfig, CohereForCausalLM
BoschCohereConfig, BoschCohereForCausalLM = config_class, model_class = hybrid_classes(
    __name__, CohereConfig, CohereForCausalLM
)
# No block_norms: attention and MLP read the same hidden states.
head_dimensions = {"q_norm.weight": 0, "k_norm.weight": 0}  # those of Command R+, for each head


def logit_factor(config: Any) -> float:
    return float(config.logit_scale)


served_by_vllm = True
