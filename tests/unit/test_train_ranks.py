"""Training in several processes, started by accelerate's launcher, against plain torch in one.

Fully sharded on CPUs over gloo, in place of GPUs over NCCL."""

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bosch.training.loop import TrainJob, train
from tests.plain_training import SETTINGS, Trace, model_folder, tokens_in_memory, train_plainly

ROOT = Path(__file__).parents[2]
PROGRAM = Path("tests/training_program.py")
# The losses of several ranks are summed in another order than those of one process.
LOSS_TOLERANCE = 1e-6
WEIGHT_TOLERANCE = 1e-5  # in norm


def start(cases: Path, *options: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--use_fsdp"]
    return subprocess.Popen(
        [*launcher, "--mixed_precision", "no", "--num_processes", "2", *options, PROGRAM, cases],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    with process:
        try:
            output, _ = process.communicate(timeout=1_800)  # ends processes that hang
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, output
    return output


def write_cases(folder: Path, cases: dict[str, tuple[Path, dict[str, Any]]]) -> Path:
    content = [
        {"model": str(model), "out": str(folder / name), "settings": settings}
        for name, (model, settings) in cases.items()
    ]
    (folder / "cases.json").write_text(json.dumps(content))
    return folder / "cases.json"


def assert_close(
    ours: Trace,
    plain: Trace,
    loss_tolerance: float = LOSS_TOLERANCE,
    weight_tolerance: float = WEIGHT_TOLERANCE,
) -> None:
    # Absolute too: a divergence is a small difference of large numbers.
    assert ours.losses == pytest.approx(plain.losses, rel=loss_tolerance, abs=loss_tolerance)
    assert ours.norms == pytest.approx(plain.norms, rel=10 * loss_tolerance, abs=loss_tolerance)
    for name, weight in plain.weights.items():
        difference = torch.linalg.norm(ours.weights[name] - weight)
        assert difference <= weight_tolerance * torch.linalg.norm(weight), name


def test_two_processes_train_as_plain_torch(tmp_path: Path) -> None:
    untied = model_folder(tmp_path / "untied")
    tied = model_folder(tmp_path / "tied", tie_word_embeddings=True)
    experts = model_folder(tmp_path / "experts", family="qwen3_moe")
    cases: dict[str, tuple[Path, dict[str, Any]]] = {
        "accumulated": (untied, {}),
        "tied, one sync a step, checkpointed": (
            tied,
            {"sync_every_micro_batch": False, "activation_checkpointing": True},
        ),
        "offloaded": (untied, {"cpu_offload": True}),
        "experts": (experts, {"micro_batch_sequences": 2}),
        "distilled": (untied, {"objective": "distill"}),
        "distilled, tied, offloaded": (tied, {"objective": "distill", "cpu_offload": True}),
        "lora": (tied, {"trained": "lora"}),
    }
    path = write_cases(tmp_path, cases)
    finish(start(path, "--main_process_port", "0"))
    for name, (model, settings) in cases.items():
        if name == "lora":
            alone = replace(SETTINGS, **settings)
            train(TrainJob(alone, model, tokens_in_memory(), tmp_path / "alone", 10**9))
            plain = Trace.of_run(tmp_path / "alone", 5)
        else:
            plain = train_plainly(model, replace(SETTINGS, **settings))
        # AdamW steps by the rate however small the gradient is, and a divergence has small ones.
        tolerance = (5 if "distilled" in name else 1) * WEIGHT_TOLERANCE
        assert_close(Trace.of_run(tmp_path / name, 5), plain, weight_tolerance=tolerance)


@pytest.mark.slow
def test_two_launchers_train_as_one(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    path = write_cases(tmp_path, {"out": (model, {})})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    shared = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    for process in [start(path, *shared, "--machine_rank", rank) for rank in ("0", "1")]:
        finish(process)
    two_machines = Trace.of_run(tmp_path / "out", 5)

    path = write_cases(tmp_path, {"one launcher": (model, {})})
    finish(start(path, "--main_process_port", "0"))
    one_machine = Trace.of_run(tmp_path / "one launcher", 5)
    assert two_machines.losses == one_machine.losses
    for name, weight in one_machine.weights.items():
        assert torch.equal(two_machines.weights[name], weight), name
