"""A backend is one new file: the example of docs/extending.md through the command line. And what
naming a backend means for the search and the evaluation."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bosch.backends import reference
from bosch.backends._interface import AttentionCall
from bosch.eval.judging import Judging, load_judged
from bosch.run.errors import UserError
from bosch.search.layers import Layers
from bosch.search.outcomes import scoring_facts
from tests.attention_matrices import info_of, toy_calibration
from tests.model_factory import MIXED, random_tokens, tiny_model
from tests.package_copy import PackageCopy, example_of_page

MODEL = "tiny-qwen3-2layer"
# Behind the example: counts its calls in the file that ATTENTION_CALLS names.
COUNTING = """

import os

computed = attend


def attend(call: AttentionCall) -> Tensor:
    with open(os.environ["ATTENTION_CALLS"], "a") as file:
        file.write("gradients " if call.needs_grad else "none ")
    return computed(call)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> PackageCopy:
    """The package with the example in its place."""
    copy = PackageCopy(tmp_path_factory.mktemp("copy"))
    copy.write("bosch/backends/mine.py", example_of_page("bosch/backends/mine.py") + COUNTING)
    return copy


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTENTION_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.mark.slow
def test_every_stage_runs_on_the_example(copy: PackageCopy, tmp_path: Path, calls: Path) -> None:
    run, model = tmp_path / "run", ("--model", MODEL)
    commands = {
        "gradients": [
            ("recover", "--preset", "smoke", "--method", "interleave"),
            ("--train.attention", "mine", "--run-dir", str(run)),
        ],
        "none": [
            ("search_mask", "--preset", "smoke", "--method", "bosch_layer", "--ratio", "0.5"),
            ("--attention", "mine", "--calibration", str(run / "calibration")),
            ("--run-dir", str(tmp_path / "search")),
        ],
        "none ": [
            ("evaluate_model", *model, "--lengths", "256", "--essays", "toy", "--limit", "1"),
            ("--attention", "mine", "--out", str(tmp_path / "evaluation")),
        ],
    }
    for kind, parts in commands.items():
        recipe, *arguments = [word for part in parts for word in part]
        code, _, errors = copy.run(f"bosch.recipes.{recipe}", *arguments)
        assert code == 0, errors
        assert kind in calls.read_text()
        calls.unlink()
    settings = json.loads((tmp_path / "search" / "mask" / "manifest.json").read_text())["settings"]
    assert settings["attention"] == "mine"
    settings = json.loads((run / "mask" / "manifest.json").read_text())["settings"]
    assert "attention" not in settings  # so fingerprints stay as they were


def test_a_search_runs_on_the_backend_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of the top layer where the backend takes no mask, which single rows need."""
    model, ids, rows = tiny_model("qwen3"), random_tokens(1, 40)[0], torch.tensor([3, 39])

    def top_rows() -> torch.Tensor:
        layers = Layers(model, 8)
        return layers.run(0, *layers.embed(ids), MIXED[0], rows)

    with torch.inference_mode():
        expected = top_rows()
        masks: list[bool] = []
        computed = reference.attend

        def attend(call: AttentionCall) -> torch.Tensor:
            masks.append(call.mask_BNTS is not None)
            return computed(call)

        monkeypatch.setattr(reference, "attend", attend)
        model.config.bosch_backend = "reference"
        torch.testing.assert_close(top_rows(), expected)
        assert masks == [True, True]  # the full groups and the others
        takes_no_mask = lambda call: None if call.mask_BNTS is None else "it takes no mask"  # noqa: E731
        monkeypatch.setattr(reference, "supports", takes_no_mask)
        torch.testing.assert_close(top_rows(), expected)
        assert masks[2:] == [False, False]


def test_scores_of_a_named_backend_are_remembered_apart() -> None:
    model = tiny_model("qwen3")
    info, calibration = info_of(model), toy_calibration(64, 1)
    facts = [scoring_facts(model, info, calibration, 8)]
    model.config.bosch_backend = "reference"
    facts.append(scoring_facts(model, info, calibration, 8))
    assert facts[0] != facts[1]
    assert "bosch_backend" not in facts[0]["configuration"]


def test_a_backend_cannot_be_named_for_a_model_of_another_family(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", n_layer=1, n_head=2, n_embd=8, vocab_size=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"--attention reference.*gpt2"):
        load_judged(tmp_path, Judging((), attention="reference"))
