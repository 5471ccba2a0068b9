"""Cohere2 (Command R7B) as a hybrid: attention and MLP side by side; its logits are scaled."""

from transformers import Cohere2Config, Cohere2ForCausalLM

from bosch.hybrid.models import hybrid_classes

plain_config_class, plain_model_class = Cohere2Config, Cohere2ForCausalLM
BoschCohere2Config, BoschCohere2ForCausalLM = config_class, model_class = hybrid_classes(
    __name__, Cohere2Config, Cohere2ForCausalLM
)
# No block_norms: attention and MLP read the same hidden states.


def logit_factor(config: Cohere2Config) -> float:
    return float(config.logit_scale)


served_by_vllm = True
