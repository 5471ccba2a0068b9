"""recover.py with models of the user's own: small ones with random weights, of several families,
each with a BPE tokenizer trained on the spot, and a text file to train on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bosch.data.toy_world.documents import write_document
from bosch.masks.mask import read_mask
from bosch.recipes import recover
from tests.own_models import write_own_model

pytestmark = pytest.mark.slow
PAGES = [write_document(seed=2, number=number) for number in range(60)]


def run_chain(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(recover.__file__), *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


# A model with random weights answers nothing right: by the answers' probability `bosch` can still
# search where windows make it worse, which is chance and true with this text; `fisher` needs no
# right answers.
OWN = ("gemma3_text", "olmo3")
BY_LOGPROB = ("--mask.options", "objective=logprob", "--mask.kappa", "2")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", BY_LOGPROB),
        ("mistral", ("--method", "fisher")),
        ("qwen2", ("--method", "fisher")),
        ("qwen3_moe", ("--method", "interleave", "--train.objective", "distill")),
        # Half of the layers have windows of their own, which no mask chooses.
        ("gemma3_text", BY_LOGPROB),
        ("olmo3", ("--method", "fisher", "--train.objective", "distill")),
    ],
)
def test_the_whole_chain_runs(family: str, options: tuple[str, ...], tmp_path: Path) -> None:
    own: dict[str, Any] = {}
    if family in OWN:
        own = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
        own |= {"sliding_window": 24}
    model = write_own_model(tmp_path / "model", family, PAGES, **own)
    (tmp_path / "text.txt").write_text("\n\n".join(PAGES))
    words = ("--model", str(model), "--data.source", "text.txt", "--data.tokens", "16k")
    less = ("--calibration.examples", "8", "--eval.samples", "1", "--eval.checkpoints", "0", "1")
    run = run_chain(tmp_path, *words, *less, "--run-dir", "runs/own", *options)
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "runs" / "own"
    mask = read_mask(folder / "mask" / "mask.json").mask
    assert mask.num_windowed >= 9
    assert mask.own_windows == ((24, 24, 24) if own else ())
    saved = json.loads((folder / "run.json").read_text())["config"]
    assert saved["data"]["sequence_length"] == 256
    rows = (folder / "eval" / "results.jsonl").read_text().splitlines()
    averages = {(row["suite"], row["task"], row["step"]) for row in map(json.loads, rows)}
    for step in (None, 0, 15):
        assert {("niah", "average", step), ("longbench", "average", step)} <= averages
    assert (folder / "report" / "report.html").is_file()
    assert "stage 1 of 8, calibration: starts" in run.stdout
    again = run_chain(tmp_path, *words, *less, "--run-dir", "runs/own", *options)
    assert "train: complete, reused" in again.stdout


def test_a_search_that_cannot_rank_masks_ends_right_after_calibration(tmp_path: Path) -> None:
    model = write_own_model(tmp_path / "model", "llama", PAGES)
    run = run_chain(tmp_path, "--model", str(model), "--calibration.examples", "4", "--zero-shot")
    assert run.returncode == 2
    assert "objective=logprob" in run.stderr
    assert "eval/dense" not in run.stdout
