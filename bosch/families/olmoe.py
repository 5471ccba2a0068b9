"""OLMoE as a hybrid: norms of q and k over all heads."""

from transformers import OlmoeConfig, OlmoeForCausalLM

from bosch.hybrid.models import hybrid_classes

plain_config_class, plain_model_class = OlmoeConfig, OlmoeForCausalLM
BoschOlmoeConfig, BoschOlmoeForCausalLM = config_class, model_class = hybrid_classes(
    __name__, OlmoeConfig, OlmoeForCausalLM
)
# No block_norms: clip_qkv clips queries, keys and values, which rows by themselves are not.
head_dimensions = {"q_norm.weight": 0, "k_norm.weight": 0}  # these weights are permuted too
served_by_vllm = True
