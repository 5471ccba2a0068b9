"""Training in several processes, started by accelerate's launcher, against plain torch in one.

Fully sharded on CPUs over gloo, in place of GPUs over NCCL."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plain_training import SETTINGS, Trace, launch_two, model_folder, run, train_plainly

# The losses of several ranks are summed in another order than those of one process.
LOSS_TOLERANCE = 1e-6
WEIGHT_TOLERANCE = 1e-5  # in norm


def assert_close(ours: Trace, plain: Trace, weight_tolerance: float) -> None:
    # Absolute too: a divergence is a small difference of large numbers.
    assert ours.losses == pytest.approx(plain.losses, rel=LOSS_TOLERANCE, abs=LOSS_TOLERANCE)
    assert ours.norms == pytest.approx(plain.norms, rel=10 * LOSS_TOLERANCE, abs=LOSS_TOLERANCE)
    for name, weight in plain.weights.items():
        difference = torch.linalg.norm(ours.weights[name] - weight)
        assert difference <= weight_tolerance * torch.linalg.norm(weight), name


def test_two_processes_train_as_plain_torch(tmp_path: Path) -> None:
    untied = model_folder(tmp_path / "untied")
    tied = model_folder(tmp_path / "tied", tie_word_embeddings=True)
    experts = model_folder(tmp_path / "experts", family="qwen3_moe")
    once = {"sync_every_micro_batch": False, "activation_checkpointing": True}
    cases: dict[str, tuple[Path, dict[str, Any]]] = {
        "accumulated": (untied, {}),
        "tied, one sync a step, checkpointed": (tied, once),
        "offloaded": (untied, {"cpu_offload": True}),
        "experts": (experts, {"micro_batch_sequences": 2}),
        "distilled": (untied, {"objective": "distill"}),
        "distilled, tied, offloaded": (tied, {"objective": "distill", "cpu_offload": True}),
        "lora": (tied, {"trained": "lora"}),
    }
    content = [
        {"model": str(model), "out": str(tmp_path / name), "settings": settings}
        for name, (model, settings) in cases.items()
    ]
    (tmp_path / "cases.json").write_text(json.dumps(content))
    launch_two("training_program.py", tmp_path / "cases.json")
    for name, (model, settings) in cases.items():
        if name == "lora":
            run(tmp_path / "alone", model, replace(SETTINGS, **settings))
            plain = Trace.of_run(tmp_path / "alone", 5)
        else:
            plain = train_plainly(model, replace(SETTINGS, **settings))
        # AdamW steps by the rate however small the gradient is, and a divergence has small ones.
        tolerance = (5 if "distilled" in name else 1) * WEIGHT_TOLERANCE
        assert_close(Trace.of_run(tmp_path / name, 5), plain, tolerance)
