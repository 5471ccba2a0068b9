"""Measured scores of the tiny model, against plain generation."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.tiny_model import measure
from bosch.assets import asset_folder

FOLDER = asset_folder("tiny-qwen3-2layer")


def test_needle_scores_are_those_of_plain_generation_dense_and_windowed() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    tasks = measure.needle_examples(tokenizer, 256, samples=4, seed=0)
    totals = []
    for windowed in (False, True):
        model: Any = measure.load(FOLDER, windowed, window=64)
        scores = measure.ruler_scores(model, tokenizer, tasks)
        for task, examples in tasks.items():
            right = 0
            for example in examples:
                ids = tokenizer(example.prompt, return_tensors="pt")["input_ids"]
                made = model.generate(ids, max_new_tokens=40)
                text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
                right += example.answers[0].lower() in text.lower()
            assert scores[task] == 100 * right / len(examples)
        totals.append(sum(scores.values()))
    assert totals[0] > totals[1]


def test_an_answer_is_exact_if_greedy_generation_gives_it() -> None:
    model: Any = measure.load(FOLDER)
    prompts = [torch.randint(5, 200, (1, length)) for length in (9, 30, 17)]
    pairs = []
    for ids in prompts:
        made = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        pairs.append([ids[0].tolist(), made[0, ids.shape[1] :].tolist()])
    pairs[1][1][-1] += 1
    assert measure.answered_exactly(model, pairs) == [True, False, True]


def test_measurements_in_the_file_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(measure, "measure_niah", lambda *_: {"mean": 1.0, "scores": {"a": 1.0}})
    monkeypatch.setattr(measure, "measure_tasks", lambda *_: {"mean": 2.0, "scores": {"b": 2.0}})
    command = ["measure", "scores", "--model", str(FOLDER), "--out", str(out), "--lengths", "256"]
    monkeypatch.setattr(sys, "argv", command)
    measure.main()
    rows = out.read_text()
    names = [json.loads(line)["name"] for line in rows.splitlines()]
    assert names == ["full niah 256", "full tasks", "windowed niah 256", "windowed tasks"]
    measure.main()
    assert out.read_text() == rows
