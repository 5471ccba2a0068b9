"""Training of the embedded models: it runs and resumes, and a kill does not change the weights."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.tiny_model.pretrain import LATE, Curriculum, Phase, Training, train
from bosch.data.toy_world.lessons import Mixture

SMOKE = Curriculum(  # a few steps of each kind
    2,
    (
        Phase("recall-64", 2, 64, Mixture(simple_recall=1.0), rate=(0.1, 1.0)),
        Phase("tasks-128", 2, 128, LATE),
        Phase("dropout-128", 2, 128, LATE, most_windowed=0.8, is_averaged=True),
        Phase("text-128", 2, 128, LATE, (1.0, 0.1), text_weight=1.0, from_shipped=True),
    ),
    tokens_per_step=512,
    tokenizer_texts=100,
)


@pytest.mark.slow
def test_killed_and_resumed_it_ends_in_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(SMOKE, tmp_path / "whole", save_every=1)
    whole, stopped, steps = tmp_path / "whole" / "model", tmp_path / "stopped", []
    take_step = Training.take_step

    def end_in_step_six(training: Training, writer: object) -> float:
        steps.append(training.step)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return take_step(training, writer)  # type: ignore[arg-type]

    monkeypatch.setattr(Training, "take_step", end_in_step_six)
    with pytest.raises(KeyboardInterrupt):
        train(SMOKE, stopped, save_every=1)
    assert not (stopped / "model").exists()
    train(SMOKE, stopped, save_every=1)
    assert steps == [0, 1, 2, 3, 4, 5, 5, 6, 7]
    for name in ("model.safetensors", "training.json", "tokenizer.json"):
        assert (whole / name).read_bytes() == (stopped / "model" / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(whole)
    ids = AutoTokenizer.from_pretrained(whole)("One of the special magic numbers").input_ids
    assert model.dtype == torch.bfloat16
    assert model.generate(torch.tensor([ids]), max_new_tokens=4).shape[1] > len(ids)
