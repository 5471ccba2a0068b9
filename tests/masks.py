"""Masks, records and model folders that several tests use."""

import json
from pathlib import Path

from hypothesis import strategies as st

from bosch.masks.mask import GroupMask, MaskFile
from bosch.model import ModelInfo

SHAPE = {"num_layers": 2, "num_groups": 4, "num_query_heads": 8, "head_dim": 16}
MODEL = ModelInfo("org/small", revision="0123456789abcdef", weight_hash=None, **SHAPE)


@st.composite
def masks(draw: st.DrawFn) -> GroupMask:
    num_layers, num_groups = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    row = st.lists(st.integers(0, 1), min_size=num_groups, max_size=num_groups)
    rows = draw(st.lists(row, min_size=num_layers, max_size=num_layers))
    return GroupMask.from_rows(rows, draw(st.integers(1, 200_000)))


def record_of(mask: GroupMask) -> MaskFile:
    """With a model of the mask's shape."""
    shape = mask.num_layers, mask.num_groups, mask.num_groups * 2
    return MaskFile(
        mask, ModelInfo("org/any", None, "f" * 32, *shape, 16), "bosch", mask.ratio, seed=0
    )


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
