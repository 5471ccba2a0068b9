"""OLMo-2 as a hybrid: norms after attention and MLP, and norms of q and k over all heads."""

from transformers import Olmo2Config, Olmo2ForCausalLM

from bosch.hybrid.models import BlockNorms, HybridCausalLM, HybridConfig

plain_config_class = Olmo2Config
plain_model_class = Olmo2ForCausalLM


class BoschOlmo2Config(HybridConfig, Olmo2Config):
    model_type = "bosch_olmo2"


class BoschOlmo2ForCausalLM(HybridCausalLM, Olmo2ForCausalLM):
    config_class = BoschOlmo2Config


config_class = BoschOlmo2Config
model_class = BoschOlmo2ForCausalLM
block_norms = BlockNorms(
    after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)
head_dimensions = {"q_norm.weight": 0, "k_norm.weight": 0}  # these weights are permuted too
