"""GLM-4 as a hybrid: norms before and after attention and MLP; a part of each head is rotated."""

from transformers import Glm4Config, Glm4ForCausalLM

from bosch.hybrid.models import BlockNorms, hybrid_classes

plain_config_class, plain_model_class = Glm4Config, Glm4ForCausalLM
BoschGlm4Config, BoschGlm4ForCausalLM = config_class, model_class = hybrid_classes(
    __name__, Glm4Config, Glm4ForCausalLM
)
block_norms = BlockNorms(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)
served_by_vllm = True
