"""vLLM plug-in for the hybrids of bosch-hybrid. vLLM calls `register` in each of its processes."""

from importlib.util import find_spec

STOCK = "vllm.model_executor.models"
# The stock model of each hybrid architecture, as module:class in STOCK: its own, or one that
# computes the same (GLM and Helium are Llama with rotary positions of neighboring entries, as Ernie
# is). None: vLLM 0.32 has none, and would build the family from transformers' code, whose attention
# is not exchanged here.
FAMILIES: dict[str, str | None] = {
    "BoschApertusForCausalLM": "apertus:ApertusForCausalLM",
    "BoschArceeForCausalLM": None,
    "BoschCohere2ForCausalLM": "commandr:CohereForCausalLM",
    "BoschCohereForCausalLM": "commandr:CohereForCausalLM",
    "BoschErnie4_5ForCausalLM": "ernie45:Ernie4_5ForCausalLM",
    "BoschExaone4ForCausalLM": "exaone4:Exaone4ForCausalLM",
    "BoschGemma3ForCausalLM": "gemma3:Gemma3ForCausalLM",
    "BoschGemmaForCausalLM": "gemma:GemmaForCausalLM",
    "BoschGlm4ForCausalLM": "glm4:Glm4ForCausalLM",
    "BoschGlmForCausalLM": "ernie45:Ernie4_5ForCausalLM",
    "BoschGraniteForCausalLM": "granite:GraniteForCausalLM",
    "BoschHeliumForCausalLM": "ernie45:Ernie4_5ForCausalLM",
    "BoschHunYuanDenseV1ForCausalLM": None,
    "BoschLlamaForCausalLM": "llama:LlamaForCausalLM",
    "BoschMinistralForCausalLM": "llama:LlamaForCausalLM",
    "BoschMistralForCausalLM": "mistral:MistralForCausalLM",
    "BoschMixtralForCausalLM": "mixtral:MixtralForCausalLM",
    "BoschOlmo2ForCausalLM": None,
    "BoschOlmo3ForCausalLM": None,
    "BoschOlmoeForCausalLM": "olmoe:OlmoeForCausalLM",
    "BoschOlmoForCausalLM": None,
    "BoschPhi3ForCausalLM": "phi3:Phi3ForCausalLM",
    "BoschQwen2ForCausalLM": "qwen2:Qwen2ForCausalLM",
    "BoschQwen2MoeForCausalLM": "qwen2_moe:Qwen2MoeForCausalLM",
    "BoschQwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
    "BoschQwen3MoeForCausalLM": "qwen3_moe:Qwen3MoeForCausalLM",
    "BoschSeedOssForCausalLM": None,
    "BoschSmolLM3ForCausalLM": None,
    "BoschStarcoder2ForCausalLM": None,
}


def register() -> None:
    import transformers.models.auto  # noqa: F401
    import vllm
    from vllm.logger import init_logger

    from bosch_vllm.refusals import check_engine

    if warning := check_engine(vllm.__version__):
        init_logger("vllm.bosch").warning("%s: compare its answers (make serving).", warning)
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import bosch  # noqa: F401  makes AutoConfig know the model_type bosch_<family>
    from bosch_vllm.settings import HybridSettings, NoStockModel

    for architecture in FAMILIES:
        # Their checks run before anything is built.
        if is_served(architecture):
            place, settings = f"bosch_vllm.models:{architecture}", HybridSettings
        else:  # vLLM looks at some class before it asks whether it is refused
            place, settings = f"{STOCK}.llama:LlamaForCausalLM", NoStockModel
        vllm.ModelRegistry.register_model(architecture, place)
        MODELS_CONFIG_MAP[architecture] = settings


def is_served(architecture: str) -> bool:
    """Whether this vLLM has a model for the family."""
    stock = FAMILIES[architecture]
    return stock is not None and find_spec(f"{STOCK}.{stock.partition(':')[0]}") is not None
