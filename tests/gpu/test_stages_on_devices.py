"""What a run does on its device: steps of training, checkpoints, a search's cached states and
evaluation. The CPU runs the same tests, so that a GPU is all that is new in them.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from bosch.assets import asset_folder
from bosch.eval.evaluate import EvaluationPlan, load_for_evaluation
from bosch.eval.generate import Generator
from bosch.eval.settings import FAST, PLAIN, GenerationSettings
from bosch.eval.suites import niah
from bosch.eval.suites._interface import Example
from bosch.model import load_tokenizer
from bosch.run.dist import leave_ranks
from bosch.search.settings import NO_ACCELERATIONS, Accelerations
from bosch.training.loop import train
from tests.plain_training import SETTINGS, Trace, job_of, model_folder, run, train_plainly
from tests.search_cases import answered_calibration, evaluator_of, random_masks, small_model

# Other versions of torch on other machines warn of other things, and findings there are rare.
pytestmark = pytest.mark.filterwarnings("default")

HAS_GPU = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
ON_CPU = pytest.mark.skipif(HAS_GPU, reason="the stages take the GPU where there is one")
GPU = pytest.param("cuda", marks=ON_GPU)
on_devices = pytest.mark.parametrize("device", [pytest.param("cpu", marks=ON_CPU), GPU])
# Of losses beside those of plain torch on the CPU; norms, sums of squares, differ by more.
ROUNDING = {"fp32": 1e-4, "bf16": 0.03}
TWO_STEPS = replace(SETTINGS, max_steps=2)
ROOT = Path(__file__).parents[2]
KILLED_AFTER = 5  # steps, with checkpoints of every second one
KILLED = f"""
import os, signal
from bosch.recipes.recover import main
from bosch.run.errors import run_main
from bosch.training.metrics import MetricsLog

def write_and_die(log, row, write=MetricsLog.write):
    write(log, row)
    if row["step"] == {KILLED_AFTER}:
        os.kill(os.getpid(), signal.SIGKILL)

MetricsLog.write = write_and_die
run_main(main)
"""


@on_devices
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16", "activation_checkpointing": True, "compile": True},
        {"precision": "bf16", "activation_checkpointing": "attention", "compile": True},
        {"precision": "bf16", "cpu_offload": True, "reshard_after_forward": False},
        pytest.param({"kernels": "liger"}, id="liger, fp32"),
        pytest.param({"precision": "bf16", "kernels": "liger"}, id="liger, bf16"),
        pytest.param({"objective": "distill"}, id="distill"),
        pytest.param({"objective": "distill", "kernels": "liger"}, id="liger, distill"),
    ],
)
def test_steps_are_plain_torchs(changes: dict[str, Any], device: str, tmp_path: Path) -> None:
    if device == "cpu" and changes.keys() & {"kernels", "compile"}:
        pytest.skip("Liger and compiled blocks take minutes on a CPU")
    model = model_folder(tmp_path / "model")
    settings = replace(TWO_STEPS, **changes)
    # In documents no longer than the window a hybrid is the dense model, so the gradient of their
    # divergence is 0. Adam makes whole steps of its rounding, which is another one on a GPU: there
    # each row is one document.
    masked = device == "cpu" or settings.objective != "distill"
    rows = run(tmp_path / "train", model, settings, document_mask=masked)
    plain = train_plainly(model, settings, masked=masked)
    ours = Trace.of_run(tmp_path / "train", 2)
    assert ours.losses == pytest.approx(plain.losses, rel=ROUNDING[settings.precision])
    assert ours.norms == pytest.approx(plain.norms, rel=5 * ROUNDING[settings.precision])
    assert ("memory_gb" in rows[-1]) == (device == "cuda")


@pytest.mark.parametrize(
    ("device", "precision", "deterministic"),
    [
        *(pytest.param("cuda", *each, marks=ON_GPU) for each in product(("fp32", "bf16"), (0, 1))),
        # A CPU always ends in the same bits. Whether each kill does, tests/faults/ asks there.
        pytest.param("cpu", "bf16", 1, marks=ON_CPU),
    ],
)
def test_a_stopped_training_goes_on_from_its_checkpoint(
    device: str, precision: Any, deterministic: int, tmp_path: Path
) -> None:
    model = model_folder(tmp_path / "model")
    settings = replace(
        SETTINGS, precision=precision, deterministic=bool(deterministic), max_steps=3
    )
    whole = run(tmp_path / "whole", model, settings)
    leave_ranks()  # as each process would
    folder = tmp_path / "stopped" / "train"
    folder.mkdir(parents=True)
    (folder / "STOP").touch()
    assert "STOP" in str(train(job_of(folder, model, settings)))
    (folder / "STOP").unlink(missing_ok=True)
    leave_ranks()
    resumed = run(folder, model, settings)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    # A GPU adds gradients as they come, unless asked not to; the CPU always ends in the same bits.
    close = ROUNDING[precision] if device == "cuda" and not deterministic else 0.0
    for row, other in zip(resumed, whole, strict=True):
        for name in {"loss", "grad_norm", "validation_loss"} & other.keys():
            assert row[name] == pytest.approx(other[name], rel=close, abs=0.0), (name, row["step"])


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=[ON_CPU, pytest.mark.slow]), GPU])
def test_a_killed_chain_trains_and_evaluates_to_its_end(device: str, tmp_path: Path) -> None:
    """recover.py in processes of its own: the losses of the steps that both made are the same."""
    run = tmp_path / "run"
    chosen = ["--preset", "smoke", "--run-dir", str(run), "--data.tokens", "4096"]
    chosen += ["--train.checkpoint-steps", "2", "--train.compile", "False"]
    chosen += ["--eval.suites", "niah"]

    def losses(*python: str) -> tuple[int, list[float]]:
        done = subprocess.run([sys.executable, *python, *chosen], cwd=ROOT)
        lines = (run / "train" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["step"] for row in rows] == list(range(len(rows)))
        return done.returncode, [row["loss"] for row in rows[1:]]

    status, before = losses("-c", KILLED)
    assert (status, len(before)) == (-signal.SIGKILL, KILLED_AFTER)
    status, after = losses("-m", "bosch.recipes.recover")
    assert (status, len(after)) == (0, 8)  # 4,096 tokens in steps of 2 x 256
    close = ROUNDING["fp32"] if device == "cuda" else 0.0
    assert before == pytest.approx(after[:KILLED_AFTER], rel=close, abs=0.0)
    scored = (run / "eval" / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in scored} == {None, 0, 8}


@on_devices
def test_states_that_a_search_caches_change_no_score(device: str) -> None:
    """None, a few of each text, and all."""
    model = small_model()
    calibration = answered_calibration(model)
    model.to(device)
    use = Accelerations(answer_rows=False)
    texts = range(len(calibration.haystacks))
    pairs = list(product(random_masks(15), texts))
    plain = evaluator_of(model, calibration, accelerations=NO_ACCELERATIONS)
    expected = [plain.answers(z, text) for z, text in pairs]
    for memory_gb in (0.0, 5e-5, None):
        cached = evaluator_of(model, calibration, accelerations=replace(use, memory_gb=memory_gb))
        assert [cached.answers(z, text) for z, text in pairs] == expected
        assert memory_gb == 0.0 or cached.work < plain.work


@on_devices
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_evaluation_is_the_same_with_every_speed_up(precision: Any, device: str) -> None:
    folder = asset_folder("tiny-qwen3-2layer")
    model = load_for_evaluation(folder, EvaluationPlan((), precision=precision))
    assert model.device.type == device
    tokenizer, settings = load_tokenizer(folder), niah.Settings(lengths=(256,))
    examples = [
        ((task.name, task.length, example.index), example)
        for task in niah.list_tasks(settings)
        if task.name in ("niah_single_1", "niah_multikey_1")
        for example in niah.build_examples(settings, task, tokenizer, 3)
    ]

    def answers(settings: GenerationSettings) -> Iterable[tuple[Example, str]]:
        found = {
            each.key: each.text for each in Generator(model, tokenizer, settings).generate(examples)
        }
        return [(example, found[key]) for key, example in examples]

    stopped = replace(PLAIN, stop_when_answered=True)
    # In bf16 a batch may turn two nearly equal tokens round.
    fast = FAST if precision == "fp32" else replace(FAST, batch=1)
    assert answers(fast) == answers(stopped)
    assert any(example.answers[0] in text for example, text in answers(stopped))
