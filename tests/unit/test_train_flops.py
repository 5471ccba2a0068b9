"""The FLOPs formula on the paper's models, against figures computed by hand."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks._measure import read_shape
from bosch.hybrid.conversion import hybrid_config
from bosch.masks.mask import spread_mask
from bosch.training.metrics import count_active_weights, training_flops, visible_pairs
from bosch.training.model_start import choose_trained
from tests.model_factory import random_tokens, tiny_model

SEQ_LEN, WINDOW = 32_768, 1_024


@pytest.mark.parametrize(
    ("name", "weights", "dense", "hybrid"),
    # GFLOPs per token: 6 N, with full attention, and with three quarters of the groups windowed.
    [
        ("Qwen3-1.7B", 10.3, 21.6, 13.7),
        ("Qwen3-8B", 45.4, 74.4, 54.0),
        ("Qwen3-14B", 83.9, 124.2, 95.9),
        ("Qwen3-30B-A3B", 18.3, 56.9, 29.7),
    ],
)
def test_flops_of_the_papers_models(name: str, weights: float, dense: float, hybrid: float) -> None:
    config = read_shape(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    num_weights = count_active_weights(model)
    assert 6 * num_weights / 1e9 == pytest.approx(weights, abs=0.06)

    z = spread_mask(0.75, config.num_hidden_layers, config.num_key_value_heads)
    made = hybrid_config(config, z, WINDOW)
    for shape, expected in ((config, dense), (made, hybrid)):
        flops = training_flops(shape, num_weights, [SEQ_LEN]) / SEQ_LEN / 1e9
        assert flops == pytest.approx(expected, abs=0.06)


def test_frozen_weights_need_no_gradients() -> None:
    """As the operations of a step are counted one by one."""
    model: Any = tiny_model("qwen3")
    ids = random_tokens(1, 16)

    def counted() -> int:
        with FlopCounterMode(display=False) as counter:
            model(ids, labels=ids, use_cache=False).loss.backward()
        return counter.get_total_flops()

    num_weights, all_learn = count_active_weights(model), counted()
    choose_trained(model, "attention", 4)
    model.get_input_embeddings().requires_grad_(True)  # so that all layers need their inputs'
    frozen = count_active_weights(model, only_frozen=True)
    whole, less = (training_flops(model.config, num_weights, [16], n) for n in (0, frozen))
    assert 0 < frozen < num_weights
    assert all_learn - counted() == whole - less


def test_pairs_are_counted_one_by_one_and_documents_do_not_see_each_other() -> None:
    for window in (None, 1, 3, 7, 8, 100):
        counted = sum(1 for i in range(8) for j in range(i + 1) if window is None or i - j < window)
        assert visible_pairs(8, window) == counted
    config = read_shape("mini")
    whole, halves = (training_flops(config, 0, lengths) for lengths in ([64], [32, 32]))
    heads = config.num_hidden_layers * config.num_attention_heads
    assert whole - halves == 12 * config.head_dim * heads * 32 * 32
