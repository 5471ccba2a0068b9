"""Phi-3 and Phi-4 as hybrids: queries, keys and values are one projection."""

from transformers import Phi3Config, Phi3ForCausalLM

from bosch.hybrid.models import hybrid_classes

plain_config_class, plain_model_class = Phi3Config, Phi3ForCausalLM
BoschPhi3Config, BoschPhi3ForCausalLM = config_class, model_class = hybrid_classes(
    __name__, Phi3Config, Phi3ForCausalLM
)
fused = {"qkv_proj.weight": "qkv"}
served_by_vllm = True
