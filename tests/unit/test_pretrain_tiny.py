"""Training of the embedded models: it runs and resumes, and a kill does not change the weights."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.tiny_model import pretrain
from benchmarks.tiny_model.pretrain import eight_layers, initialize, smoke, two_layers
from bosch.run.errors import UserError

ROOT = Path(__file__).parents[2]


def command(out: Path) -> list[str]:
    options = ["--preset", "smoke", "--save-every", "1", "--report-every", "1"]
    return ["benchmarks/tiny_model/pretrain.py", *options, "--out", str(out)]


def start(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(out: Path) -> str:
    """In this process."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", command(out))
        pretrain.main()
    return output.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert "8 of 8 steps" in finish(folder)
    return folder


@pytest.mark.slow
def test_killed_and_resumed_it_ends_bit_identical(whole: Path, tmp_path: Path) -> None:
    with start(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("pretrain: 5 of 8"):
                process.kill()
                break
    assert not (tmp_path / "model").exists()
    assert "4 of 8 steps" not in finish(tmp_path)
    for name in ("model/model.safetensors", "model/training.json", "tokenizer.json", "log.jsonl"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()


def test_a_checkpoint_that_does_not_fit_is_refused(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes((whole / "checkpoint.pt").read_bytes())
    with pytest.raises(UserError, match=str(path)):
        pretrain.Training(two_layers()).load(path)
    for content in (b"", b"damaged", path.read_bytes()[:1000]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=str(path)):
            pretrain.Training(smoke()).load(path)


def test_the_finished_model_loads_like_any_other(whole: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    ids = tokenizer("One of the special magic numbers", return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert 1 <= made.shape[1] - ids["input_ids"].shape[1] <= 4
    assert model.dtype == torch.bfloat16


def test_every_step_has_a_phase_and_the_rate_starts_and_ends_low() -> None:
    for curriculum in (eight_layers(), two_layers(), smoke()):
        rates = [phase.factor(done) for phase, done in curriculum.steps]
        assert rates[0] < 0.2 * max(rates)
        assert rates[-1] < 0.5 * max(rates)


def test_the_models_have_their_size() -> None:
    for curriculum, layers in ((eight_layers(), 8), (two_layers(), 2)):
        assert curriculum.model.num_hidden_layers == layers
        assert curriculum.model.num_attention_heads == 16
        model = AutoModelForCausalLM.from_config(curriculum.model)
        assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000


def test_initialization_is_a_function_of_the_seed() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = AutoModelForCausalLM.from_config(smoke().model)
        initialize(model, seed)
        return model.model.layers[0].mlp.up_proj.weight.detach()

    assert weights(1).equal(weights(1))
    assert not weights(1).equal(weights(2))
