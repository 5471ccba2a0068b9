"""vLLM plug-in for the hybrids of bosch-hybrid. vLLM calls `register` in each of its processes."""

# The stock model of each hybrid architecture, as module:class in vllm.model_executor.models.
FAMILIES = {
    "BoschLlamaForCausalLM": "llama:LlamaForCausalLM",
    "BoschMistralForCausalLM": "mistral:MistralForCausalLM",
    "BoschQwen2ForCausalLM": "qwen2:Qwen2ForCausalLM",
    "BoschQwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
    "BoschQwen3MoeForCausalLM": "qwen3_moe:Qwen3MoeForCausalLM",
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
    from bosch_vllm.settings import HybridSettings

    for architecture in FAMILIES:
        vllm.ModelRegistry.register_model(architecture, f"bosch_vllm.models:{architecture}")
        MODELS_CONFIG_MAP[architecture] = HybridSettings  # its checks run before anything is built
