"""HunYuan (dense) as a hybrid: norms of q and k, behind the rotary positions."""

from transformers import HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM

from bosch.hybrid.models import hybrid_classes

plain_config_class, plain_model_class = HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM
BoschHunYuanDenseV1Config, BoschHunYuanDenseV1ForCausalLM = config_class, model_class = (
    hybrid_classes(__name__, HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM)
)
# No block_norms: rows by themselves have their norms before they are rotated.
head_dimensions = {"query_layernorm.weight": None, "key_layernorm.weight": None}  # for all heads
