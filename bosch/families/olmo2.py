"""OLMo-2 as a hybrid: norms after attention and MLP, and norms of q and k over all heads."""

from transformers import Olmo2Config, Olmo2ForCausalLM

from bosch.hybrid.models import BlockNorms, hybrid_classes

plain_config_class, plain_model_class = Olmo2Config, Olmo2ForCausalLM
BoschOlmo2Config, BoschOlmo2ForCausalLM = config_class, model_class = hybrid_classes(
    __name__, Olmo2Config, Olmo2ForCausalLM
)
block_norms = BlockNorms(
    after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)
head_dimensions = {"q_norm.weight": 0, "k_norm.weight": 0}  # these weights are permuted too
kernels_compared = True
