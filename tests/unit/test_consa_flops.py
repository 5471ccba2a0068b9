"""The FLOPs of ConSA's table 4, by its own rule for the window, beside those that are computed."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from training.consa_flops import consa_step_flops
from training.flops import count_active_weights, training_flops

# The paper's two models: hidden, feed-forward and head size.
SHAPES = {"0.6B": (1_024, 3_072, 64), "1.7B": (2_048, 6_144, 128)}


def model_of(name: str) -> Qwen3ForCausalLM:
    hidden_size, intermediate_size, head_dim = SHAPES[name]
    config = Qwen3Config(
        vocab_size=102_400,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        head_dim=head_dim,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return Qwen3ForCausalLM(config)


@pytest.mark.parametrize(
    ("name", "ratio", "peta"),
    [("0.6B", 0.0, 17.42), ("0.6B", 0.5, 14.65), ("1.7B", 0.0, 52.57), ("1.7B", 0.5, 47.02)],
)
def test_the_four_numbers_of_the_papers_table(name: str, ratio: float, peta: float) -> None:
    """10^15 operations a step of 512 sequences of 8,192 tokens, window 512."""
    model = model_of(name)
    flops = consa_step_flops(
        count_active_weights(model),
        num_heads=28 * 16,
        head_size=model.config.head_dim,
        ratio=ratio,
        num_tokens=512 * 8_192,
        sequence_tokens=8_192,
        window_tokens=512,
    )
    assert round(flops / 1e15, 2) == peta


def test_the_rule_counts_half_of_a_window() -> None:
    """Of full attention it counts what is computed, up to the diagonal."""
    model = model_of("0.6B")
    weights = count_active_weights(model)
    common = {"num_heads": 28 * 16, "head_size": 64, "num_tokens": 8_192, "sequence_tokens": 8_192}
    full = consa_step_flops(weights, ratio=0.0, window_tokens=512, **common)
    assert full == pytest.approx(training_flops(model.config, weights, [8_192]), rel=1e-3)
    model.config.bosch = {"num_full": [0] * 28, "window": 512}
    windowed = training_flops(model.config, weights, [8_192]) - 6 * weights * 8_192
    by_rule = consa_step_flops(0, ratio=1.0, window_tokens=512, **common)
    assert windowed / by_rule == pytest.approx(2, rel=0.05)
