"""eval/top_layer.py gives the same last logits and cache with fewer rows of the top layer."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bosch.eval.prompt_cache import new_cache
from bosch.eval.top_layer import last_rows_only, top_layer
from bosch.hybrid.models import deploy
from tests.hybrid_folders import WINDOW
from tests.model_factory import FAMILIES, MIXED, random_tokens, tiny_model


@torch.inference_mode()
def read(model: Any, num_rows: int | None, ids: torch.Tensor, **padding: Any) -> tuple[Any, Any]:
    """The last logits, those of one more token (they test the cache), and the top MLP's rows."""
    rows: list[int] = []
    hook = top_layer(model).mlp.register_forward_hook(
        lambda _module, args, _output: rows.append(args[0].shape[1])
    )
    cache, pieces = new_cache(model.config), ids.split([30, 1, 19], dim=1)
    with last_rows_only(model, num_rows):
        for piece in pieces[:2]:
            model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        last = model(pieces[2], past_key_values=cache, use_cache=True, logits_to_keep=4, **padding)
    following = model(ids[:, :1], past_key_values=cache, use_cache=True)
    hook.remove()
    return torch.cat([last.logits, following.logits], dim=1), rows


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_logits_and_the_cache_are_those_of_all_rows(family: str) -> None:
    plain_model, ids = tiny_model(family), random_tokens(1, 50)
    for model in (plain_model, deploy(plain_model, MIXED, WINDOW)):
        expected, all_rows = read(model, None, ids)
        found, few_rows = read(model, 4, ids)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert all_rows == [30, 1, 19, 1]
        assert few_rows == [4, 1, 4, 1]


@torch.inference_mode()
def test_under_a_mask_without_a_cache_or_with_other_attention_all_rows_are_computed() -> None:
    model, ids = tiny_model("qwen3"), random_tokens(2, 50)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[0, :3] = 0
    expected, _ = read(model, None, ids, attention_mask=mask)
    found, rows = read(model, 4, ids, attention_mask=mask)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert rows[2] == 19
    whole = model(ids, use_cache=False).logits
    with last_rows_only(model, 4):
        assert torch.equal(model(ids, use_cache=False).logits, whole)
    model.set_attn_implementation("sdpa")
    assert top_layer(model) is None


def test_a_forward_set_on_the_layer_is_restored() -> None:
    """accelerate sets one on the layers of a model with a device map."""
    model = tiny_model("qwen3")
    layer = top_layer(model)
    layer.forward = hooked = Mock(wraps=layer.forward)
    read(model, 4, random_tokens(1, 50))
    assert layer.forward is hooked
    assert hooked.call_count == 4  # three pieces and the token after them
