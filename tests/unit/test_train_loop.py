"""The training loop, against plain torch and in special cases; and in several processes, started by
accelerate's launcher, fully sharded on CPUs over gloo in place of GPUs over NCCL."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import bosch.training.loop
from bosch.data.loader import Loader
from bosch.run.dist import leave_ranks
from bosch.run.errors import UserError
from bosch.run.tensorboard import read_metrics
from bosch.training.loop import train
from bosch.training.model_start import start_model
from bosch.training.parallel import start_world, whole
from bosch.training.schedule import learning_rate
from tests import plain_training
from tests.model_factory import family_parameters
from tests.plain_training import (
    SEQ_LEN,
    SETTINGS,
    Trace,
    launch_two,
    model_folder,
    run,
    tokens_in_memory,
    train_plainly,
)


def assert_same(ours: Trace, plain: Trace) -> None:
    """Bit for bit."""
    assert (ours.losses, ours.norms) == (plain.losses, plain.norms)
    torch.testing.assert_close(ours.weights, dict(plain.weights), rtol=0, atol=0)


TIED = {"tie_word_embeddings": True}
DISTILL = {"objective": "distill"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hybrid": ({}, {}),
    "dense": ({"hybrid": False}, {}),
    "tied, not clipped": (TIED, {"clip_norm": 100.0}),
    "offload": ({}, {"cpu_offload": True}),
    "tied, checkpointing": (TIED, {"activation_checkpointing": True}),
    "experts": ({"family": "qwen3_moe"}, {"micro_batch_sequences": 4}),
    "distilled, tied, mixed": (TIED, DISTILL | {"distill_weight": 0.75, "temperature": 2.0}),
    "distilled, bf16, offload": (TIED, DISTILL | {"precision": "bf16", "cpu_offload": True}),
    "bf16, checkpointing": (TIED, {"precision": "bf16", "activation_checkpointing": True}),
}
FAST = ("hybrid", "tied, checkpointing", "experts", "distilled, bf16, offload")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_one_process_trains_as_plain_torch_to_the_bit(case: str, tmp_path: Path) -> None:
    of_model, of_training = CASES[case]
    model = model_folder(tmp_path / "model", **of_model)
    settings = replace(SETTINGS, max_steps=3, **of_training)
    run(tmp_path / "train", model, settings)
    plain = plain_training.train_plainly(model, settings)
    assert_same(Trace.of_run(tmp_path / "train", 3), plain)


def test_tokens_are_trained_on_without_the_document_mask_too(tmp_path: Path) -> None:
    model, settings = model_folder(tmp_path / "model"), replace(SETTINGS, max_steps=3)
    run(tmp_path / "train", model, settings, document_mask=False)
    plain = plain_training.train_plainly(model, settings, masked=False)
    assert_same(Trace.of_run(tmp_path / "train", 3), plain)
    assert plain.losses != plain_training.train_plainly(model, settings).losses


def test_every_evaluated_step_is_validated_exported_and_passed_on(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    calls: list[tuple[int, int, str]] = []

    def note(step: int, tokens: int, folder: Path) -> None:
        assert (folder / "config.json").is_file()
        calls.append((step, tokens, folder.name))

    rows = run(tmp_path / "train", model, evaluated_shares=(0.0, 0.4, 1.0), on_checkpoint=note)
    exports = [(step, step * 4 * SEQ_LEN, f"step-{step:06d}") for step in (2, 5)]
    assert calls == [(0, 0, "model"), *exports]
    # And after 1/4 of the steps, and so on.
    validated = {row["step"]: row for row in rows if "validation_loss" in row}
    assert [*validated] == [0, 1, 2, 5]
    for row in validated.values():
        assert len(row["validation_loss_by_sequence"]) == 3
        assert list(row["validation_loss_by_position"]) == ["0"]  # all before the 64th token
        assert row["validation_loss_by_position"]["0"] == pytest.approx(row["validation_loss"])
    for step, _, name in calls:
        folder, found = tmp_path / "train" / name, validated[step]["validation_loss"]
        assert found == pytest.approx(held_out_loss(folder if step else model), rel=1e-6)


def test_recovered_model_ends_the_training_a_tenth_later(tmp_path: Path) -> None:
    """Stopped before its end and resumed, it ends with the same weights."""
    model = model_folder(tmp_path / "model")
    settings = replace(SETTINGS, batch_sequences=2, max_steps=20, until="recovered")
    asked: list[int] = []

    def has_recovered(step: int, tokens: int, folder: Path) -> bool:
        asked.append(step)
        return step >= 8

    def stop_too(step: int, tokens: int, folder: Path) -> bool:
        if step == 8:
            (tmp_path / "stopped" / "STOP").touch()
        return step >= 8

    shares = {"evaluated_shares": (0.0, 0.2, 0.4, 1.0)}
    rows = run(tmp_path / "whole", model, settings, **shares, on_checkpoint=has_recovered)
    assert asked == [0, 4, 8, 10]  # and not at 20
    rates = [row["learning_rate"] for row in rows[1:]]
    at_8 = learning_rate(settings, 8, 20)
    assert rates[8:] == pytest.approx([at_8, at_8 / 2])

    folder = tmp_path / "stopped" / "train"
    job = plain_training.job_of(folder, model, settings, **shares, on_checkpoint=stop_too)
    assert "STOP" in str(train(job))
    assert not (tmp_path / "stopped" / "STOP").exists()
    leave_ranks()  # as another process
    run(folder, model, settings, **shares, on_checkpoint=has_recovered)
    assert asked[4:] == [4, 8, 10]
    assert_same(Trace.of_run(folder, 10), Trace.of_run(tmp_path / "whole", 10))


@pytest.mark.slow
def test_training_that_is_too_slow_ends_in_time(tmp_path: Path) -> None:
    """The rate falls to zero over a tenth of all steps, and evaluations on the way are left out.
    Stopped in these steps and resumed, it ends with the same weights, whatever the clock says
    then."""
    model = model_folder(tmp_path / "model")
    settings = replace(SETTINGS, batch_sequences=2, max_steps=20)
    asked: list[tuple[int, int]] = []

    def train_with(name: str, left: Callable[[int, int], float], stop: int = 0) -> list[int]:
        """With so many seconds left after a step if so many evaluations follow. Returns the
        evaluated steps."""
        folder, evaluated = tmp_path / name / "train", list[int]()

        def seconds_left(num_evaluations: int) -> float:
            step = read_metrics(folder / "metrics.jsonl")[-1]["step"] + 1
            asked.append((step, num_evaluations))
            if step == stop:
                (tmp_path / name / "STOP").touch()
            return left(step, num_evaluations)

        def note(step: int, tokens: int, exported: Path) -> None:
            evaluated.append(step)

        shares = (0.0, 0.5, 1.0)
        more = {"on_checkpoint": note, "evaluated_shares": shares, "seconds_left": seconds_left}
        assert bool(train(plain_training.job_of(folder, model, settings, **more))) == bool(stop)
        leave_ranks()  # as another process
        return evaluated

    assert train_with("enough", lambda step, evaluations: 1e9) == [0, 10, 20]
    assert {step for step, evaluations in asked if evaluations == 2} == {10}
    # It has time for a tenth, and for one evaluation, but not for that of step 10 too.
    assert train_with("whole", lambda step, evaluations: 1e9 * (2 - evaluations)) == [0, 12]
    rows = read_metrics(tmp_path / "whole" / "train" / "metrics.jsonl")
    at_10 = learning_rate(settings, 10, 20)
    rates = [row["learning_rate"] for row in rows if row["step"] > 10]
    assert rates == pytest.approx([at_10, at_10 / 2])
    assert "validation_loss" in rows[-1]

    assert train_with("stopped", lambda step, evaluations: 1e9 * (2 - evaluations), stop=10) == [0]
    assert train_with("stopped", lambda step, evaluations: 1e9) == [12]
    ends = [Trace.of_run(tmp_path / name / "train", 12) for name in ("stopped", "whole")]
    assert_same(*ends)
    # With no time at all: after the first step whose speed is known, one more.
    assert train_with("late", lambda step, evaluations: -1.0) == [0, 3]


def held_out_loss(folder: Path) -> float:
    """Of a folder's model, sequence by sequence, with transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, targets = 0.0, 0
    for batch in Loader(tokens_in_memory(), 1).held_out(1):
        with torch.no_grad():
            ids_and_positions = batch.ids_BT, batch.position_ids_BT
            logits = plain_training.forward(model, SETTINGS, *ids_and_positions).flatten(0, 1)
        total += float(F.cross_entropy(logits, batch.labels_BT.flatten(), reduction="sum"))
        targets += batch.num_targets
    return total / targets


def test_bad_batch_is_skipped_named_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bosch")
    real, seen = bosch.training.loop.model_loss, []

    def spoil_the_third_step(*arguments: Any) -> Any:
        seen.append(torch.is_grad_enabled())
        loss = real(*arguments)
        return loss * float("nan") if seen[-1] and seen.count(True) == 9 else loss

    monkeypatch.setattr(bosch.training.loop, "model_loss", spoil_the_third_step)
    model = model_folder(tmp_path / "model")
    rows = run(tmp_path / "train", model)
    assert (rows[3]["skipped"], rows[3]["skipped_steps"]) == ("non-finite", 1)
    sequences = Loader(tokens_in_memory(), 4).sequences(2)
    assert f"sequences {' '.join(map(str, sequences))}" in caplog.text
    assert all(torch.isfinite(torch.tensor([row["loss"] for row in rows[4:]])))


def test_weights_that_are_not_finite_end_training_without_a_step(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"].fill_(float("nan"))
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"3 steps .*train\.peak_learning_rate"):
        run(tmp_path / "train", model)


@pytest.mark.parametrize(
    ("family", "dtype"), [*family_parameters(torch.float32), ("qwen3", torch.bfloat16)]
)
def test_start_loads_as_transformers_does(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In fp32, whatever type the files have."""
    folder = model_folder(tmp_path / "model", family=family)
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = start_model(folder, SETTINGS, start_world())
    found, wanted = ([*m.named_parameters(), *m.named_buffers()] for m in (model, expected))
    for (name, ours), (_, theirs) in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(whole(ours.detach()), theirs), name


# --- several processes ---


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
    train_on_two_ranks(tmp_path, [case_of(untied, tmp_path / "accumulated")])
    plain = train_plainly(untied, SETTINGS)
    assert_close(Trace.of_run(tmp_path / "accumulated", 5), plain, WEIGHT_TOLERANCE)


def case_of(model: Path, out: Path, **settings: Any) -> dict[str, Any]:
    return {"model": str(model), "out": str(out), "settings": settings}


def train_on_two_ranks(folder: Path, cases: list[dict[str, Any]]) -> None:
    (folder / "cases.json").write_text(json.dumps(cases))
    launch_two("training_program.py", folder / "cases.json")


@pytest.mark.slow
def test_two_processes_train_as_plain_torch_in_every_way(tmp_path: Path) -> None:
    untied = model_folder(tmp_path / "untied")
    tied = model_folder(tmp_path / "tied", tie_word_embeddings=True)
    experts = model_folder(tmp_path / "experts", family="qwen3_moe")
    once = {"sync_every_micro_batch": False, "activation_checkpointing": True}
    cases: dict[str, tuple[Path, dict[str, Any]]] = {
        "tied, one sync a step, checkpointed": (tied, once),
        "offloaded": (untied, {"cpu_offload": True}),
        "experts": (experts, {"micro_batch_sequences": 2}),
        "distilled": (untied, {"objective": "distill"}),
        "distilled, tied, offloaded": (tied, {"objective": "distill", "cpu_offload": True}),
        "lora": (tied, {"trained": "lora"}),
    }
    content = [
        case_of(model, tmp_path / name, **settings) for name, (model, settings) in cases.items()
    ]
    # Rank 0 has no time left, and the other one has all: both end at the same step.
    content.append(case_of(untied, tmp_path / "late") | {"seconds_left": [-1.0, 1e9]})
    train_on_two_ranks(tmp_path, content)
    for name, (model, settings) in cases.items():
        if name == "lora":
            run(tmp_path / "alone", model, replace(SETTINGS, **settings))
            plain = Trace.of_run(tmp_path / "alone", 5)
        else:
            plain = train_plainly(model, replace(SETTINGS, **settings))
        # AdamW steps by the rate however small the gradient is, and a divergence has small ones.
        tolerance = (5 if "distilled" in name else 1) * WEIGHT_TOLERANCE
        assert_close(Trace.of_run(tmp_path / name, 5), plain, tolerance)
    run(tmp_path / "late alone", untied, SETTINGS, seconds_left=lambda num_evaluations: -1.0)
    plain = Trace.of_run(tmp_path / "late alone", 3)
    assert_close(Trace.of_run(tmp_path / "late", 3), plain, WEIGHT_TOLERANCE)
