"""Checks vLLM's settings for a hybrid, in the process that the user started."""

from typing import Any

import torch
import vllm
from vllm import envs
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from bosch.hybrid.models import describe_stretch, family_of, has_other_stretch
from bosch.masks.window import own_windows
from bosch_vllm.packing import (
    BLOCKS_FIRST,
    LAYOUTS,
    MOST_HEADS,
    choose_layout,
    most_groups,
    why_not_packed,
)
from bosch_vllm.refusals import check_hybrid

NOT_RUN = "this has not been run"


class HybridSettings(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        config = vllm_config.model_config.hf_config
        hybrid, num_groups = getattr(config, "bosch", None), config.num_key_value_heads
        kinds = getattr(config, "layer_types", None) or ()
        check_hybrid(hybrid, config.num_hidden_layers, num_groups, kinds)
        asked_layout = vllm_config.additional_config.get("bosch_layout")
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        keeps_all = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        drafts, ranks = vllm_config.speculative_config, parallel.tensor_parallel_size
        quantized = getattr(config, "quantization_config", None) is not None
        shared = "its groups are put in the ranks' order by their plain weights"
        family = family_of(config)
        mixed = bool(getattr(family, "fused", None) or getattr(family, "head_dimensions", None))
        unequal = f"its {num_groups} groups a layer cannot be shared out"
        is_half = vllm_config.model_config.dtype == torch.float16
        no_half = "their shares need the range of bfloat16 or float32"
        per_kv = config.num_attention_heads // num_groups
        too_many = is_like_gpus(vllm_config) and not most_groups(per_kv)
        at_most = f"their attention takes {MOST_HEADS // 2} on GPUs"
        sinks, stretch = has_static_sinks(hybrid), describe_stretch(config)
        is_stretched = sinks and has_other_stretch(config, hybrid)
        clips = getattr(config, "clip_qkv", None) is not None
        lost = "sliding_attention" in kinds and config.sliding_window is None
        other = asked_layout not in (None, *LAYOUTS)
        on_gpus = "vLLM's offload is for GPUs, where nothing of this has run"
        # Refused before anything is built. What has merely not been run may work, but nobody has
        # looked.
        for name, asked, reason in (
            (f"--tensor-parallel-size {ranks}", num_groups % ranks > 0, unequal),
            ("quantized weights on several ranks", quantized and ranks > 1, shared),
            (f"{config.model_type} on several ranks", mixed and ranks > 1, shared),
            ("clip_qkv", clips, "vLLM's models clip nothing"),
            ("--disable-sliding-window", lost, "some of its layers have windows of their own"),
            ("--pipeline-parallel-size above 1", parallel.pipeline_parallel_size > 1, NOT_RUN),
            ("drafts other than ngram", drafts and drafts.method != "ngram", NOT_RUN),
            ("a KV connector", vllm_config.kv_transfer_config is not None, on_gpus),
            ("LoRA", vllm_config.lora_config is not None, NOT_RUN),
            ("an fp8 KV cache", cache.cache_dtype.startswith("fp8"), NOT_RUN),
            ("--disable-hybrid-kv-cache-manager", keeps_all, "nothing would be saved"),
            (f"static sinks and {stretch} positions", is_stretched, "they were measured without"),
            ("static sinks in float16", sinks and is_half, no_half),
            (f"static sinks and {per_kv} query heads a group", sinks and too_many, at_most),
            (f"bosch_layout {asked_layout}", other, "its layouts are units and packed"),
        ):
            if asked:
                raise ValueError(f"bosch_vllm cannot serve a hybrid with {name}: {reason}.")
        if layout_of(vllm_config)[0] == "packed":
            # Where one is named here, vLLM asks no backend; models.py does.
            cache.kv_cache_layout = (
                cache.kv_cache_layout or envs.VLLM_KV_CACHE_LAYOUT or BLOCKS_FIRST[0]
            )


class NoStockModel(VerifyAndUpdateConfig):
    """Of a family that this vLLM has no model of its own for."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        name = vllm_config.model_config.architecture.removeprefix("Bosch")
        problem = f"bosch_vllm cannot serve this hybrid: vLLM {vllm.__version__} has no model"
        raise ValueError(f"{problem} of its own for {name}. Use transformers (docs/serving.md).")


def has_static_sinks(hybrid: Any) -> bool:
    return "sink" in hybrid and hybrid["sink"]["kind"] == "static"


def is_like_gpus(vllm_config: Any) -> bool:
    """On a GPU, or on a CPU asked to decide as there, to test it: `{"bosch_like_gpus": true}`."""
    asked = vllm_config.additional_config.get("bosch_like_gpus", False)
    return bool(asked) or not current_platform.is_cpu()


def layout_of(vllm_config: Any) -> tuple[str, str]:
    """How heads are cut into modules, and why so."""
    backend = vllm_config.attention_config.backend
    lacking = why_not_packed(
        vllm_config.model_config.hf_config.bosch["num_full"],
        vllm_config.parallel_config.tensor_parallel_size,
        # How vLLM's cache lies in memory, where that is named already.
        vllm_config.cache_config.kv_cache_layout or envs.VLLM_KV_CACHE_LAYOUT,
        allowed_by(backend.get_class()) if backend else None,
        has_own_windows=bool(own_windows(vllm_config.model_config.hf_config)),
    )
    asked = vllm_config.additional_config.get("bosch_layout")
    return choose_layout(asked, is_like_gpus(vllm_config), lacking)


def allowed_by(backend: Any) -> list[str] | None:
    """Layouts of the cache that an attention backend takes; None: all."""
    # The CPU's names no layout that packed needs, but its kernels follow strides: tests/serving.
    layouts = None if current_platform.is_cpu() else backend.supported_kv_cache_layouts()
    return None if layouts is None else [layout.name for layout in layouts]
