"""Apertus as a hybrid: norms of q and k, one for all heads."""

from transformers import ApertusConfig, ApertusForCausalLM

from bosch.hybrid.models import BlockNorms, hybrid_classes

plain_config_class, plain_model_class = ApertusConfig, ApertusForCausalLM
BoschApertusConfig, BoschApertusForCausalLM = config_class, model_class = hybrid_classes(
    __name__, ApertusConfig, ApertusForCausalLM
)
block_norms = BlockNorms(before_attention="attention_layernorm", before_mlp="feedforward_layernorm")
served_by_vllm = True
