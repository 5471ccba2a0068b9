"""Gemma 3 (text) as a hybrid: four norms in a block, and it scales what it embeds."""

from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from bosch.hybrid.models import BlockNorms, hybrid_classes

plain_config_class, plain_model_class = Gemma3TextConfig, Gemma3ForCausalLM
BoschGemma3TextConfig, BoschGemma3ForCausalLM = config_class, model_class = hybrid_classes(
    __name__, Gemma3TextConfig, Gemma3ForCausalLM
)
block_norms = BlockNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
served_by_vllm = True
