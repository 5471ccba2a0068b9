"""Masks of the tiny model that are judged together are judged as each alone, and needles as plain
generation finds them."""

import random
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.tiny_model.measure import (
    judge_of,
    load,
    needle_examples,
    random_mask,
    ruler_scores,
    score,
    task_examples,
)
from bosch.assets import asset_folder

WINDOW = 64


def test_masks_with_layers_in_common_get_the_outcomes_of_each_alone() -> None:
    folder = asset_folder("tiny-qwen3-2layer")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = load(folder)
    model.set_attn_implementation("bosch")
    examples = needle_examples(tokenizer, 256, 1, "test", seed=0)
    examples += task_examples(tokenizer, 1, "test", seed=0)
    rng = random.Random(0)
    masks = [[[1] * 8, [1] * 8], [[1] * 8, [0] + [1] * 7], [[1] * 8, [1] * 7 + [0]]]
    masks += [random_mask(2, 8, 12, rng) for _ in range(2)]
    judge = judge_of(model, examples, WINDOW, memory_gb=0.5)
    for z in masks:
        found, expected = judge(z), score(model, examples, z, WINDOW)
        assert [one.right for one in found] == [one.right for one in expected]
        logs = [one.log_probability for one in expected]
        assert [one.log_probability for one in found] == pytest.approx(logs, abs=1e-4)
    assert any(outcome.right for outcome in judge(masks[0]))


def test_needles_score_as_plain_generation_finds_them_dense_and_windowed() -> None:
    folder = asset_folder("tiny-qwen3-2layer")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    examples = needle_examples(tokenizer, 256, 4, "test", seed=0)
    totals = []
    for windowed in (False, True):
        model: Any = load(folder, windowed, WINDOW)
        found = ruler_scores(model, tokenizer, examples)
        for example, value in zip(examples, found, strict=True):
            made = model.generate(torch.tensor([example.prompt_ids]), max_new_tokens=40)
            text = tokenizer.decode(made[0, len(example.prompt_ids) :], skip_special_tokens=True)
            assert value == float(example.outputs[0].lower() in text.lower())
        totals.append(sum(found))
    assert totals[0] > totals[1]
