"""Masks, records and model folders that several tests use."""

import json
from pathlib import Path

from hypothesis import strategies as st

from bosch.masks.mask import GroupMask, MaskFile
from bosch.model import ModelInfo

MODEL = ModelInfo(
    id="org/small",
    revision="0123456789abcdef",
    weight_hash=None,
    num_layers=2,
    num_groups=4,
    num_query_heads=8,
    head_dim=16,
)


@st.composite
def masks(draw: st.DrawFn, uniform: bool = False) -> GroupMask:
    """Any mask; with `uniform`, one in which each layer is either full or windowed."""
    num_layers, num_groups = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    bits = st.integers(0, 1)
    if uniform:
        rows = [[draw(bits)] * num_groups for _ in range(num_layers)]
    else:
        row = st.lists(bits, min_size=num_groups, max_size=num_groups)
        rows = draw(st.lists(row, min_size=num_layers, max_size=num_layers))
    window_tokens = draw(st.integers(1, 200_000))
    return GroupMask.from_rows(rows, window_tokens, "layer" if uniform else "group")


def model_of(mask: GroupMask, query_heads_per_group: int = 2) -> ModelInfo:
    """A model of the mask's shape."""
    heads = mask.num_groups * query_heads_per_group
    return ModelInfo("org/any", None, "f" * 32, mask.num_layers, mask.num_groups, heads, 16)


def record_of(mask: GroupMask, query_heads_per_group: int = 2) -> MaskFile:
    return MaskFile(mask, model_of(mask, query_heads_per_group), "bosch", mask.ratio, seed=0)


def small_record() -> MaskFile:
    """A record for MODEL with a value in every field."""
    return MaskFile(
        GroupMask.from_rows(["1100", "0001"], 16),
        MODEL,
        "bosch",
        ratio_asked=0.6,  # 4.8 of 8 groups: 5
        settings={"kappa": 3},
        seed=7,
        score_trace={"evaluations": 12, "first": 0.25, "last": 0.5},
        provenance={"commit": "abc"},
    )


def make_model(folder: Path) -> Path:
    """A model folder of MODEL's shape, without weights."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": MODEL.num_layers,
        "num_attention_heads": MODEL.num_query_heads,
        "num_key_value_heads": MODEL.num_groups,
        "head_dim": MODEL.head_dim,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
