"""Granite as a hybrid: it scales embeddings, attention, what blocks add, and logits."""

from transformers import GraniteConfig, GraniteForCausalLM

from bosch.hybrid.models import hybrid_classes

plain_config_class, plain_model_class = GraniteConfig, GraniteForCausalLM
BoschGraniteConfig, BoschGraniteForCausalLM = config_class, model_class = hybrid_classes(
    __name__, GraniteConfig, GraniteForCausalLM
)
# No block_norms: what a block adds is scaled.


def logit_factor(config: GraniteConfig) -> float:
    return 1 / config.logits_scaling


served_by_vllm = True
