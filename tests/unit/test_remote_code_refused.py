"""A model's folder that brings Python code: it is never run, and nobody is asked about it."""

import ast
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bosch.eval.evaluate import EvaluationPlan
from bosch.eval.lm_eval_bridge import run_lm_eval
from bosch.eval.settings import Label
from bosch.hybrid.materialize import materialize
from bosch.model import load_model, load_tokenizer
from bosch.run.errors import UserError
from tests.hybrid_folders import plain_folder, record_for
from tests.terminal import on_a_terminal

ROOT = Path(__file__).parents[2]
CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

Path({marker!r}).touch()

class Theirs(PretrainedConfig):
    model_type = "theirs"

class TheirModel(Qwen3ForCausalLM):
    config_class = Theirs

class TheirTokenizer(PreTrainedTokenizerFast):
    pass
"""
CLASSES = {"AutoConfig": "code.Theirs", "AutoModelForCausalLM": "code.TheirModel"}


def folder_with_code(folder: Path, model_type: str | None, tokenizer: bool = False) -> Path:
    """A model folder whose code leaves a file `ran`. model_type None: the family's own."""
    plain_folder(folder)
    (folder / "code.py").write_text(CODE.format(marker=str(folder / "ran")))
    change(folder / "config.json", auto_map=CLASSES)
    if model_type:
        change(folder / "config.json", model_type=model_type)
    if tokenizer:
        path, names = folder / "tokenizer_config.json", [None, "code.TheirTokenizer"]
        change(path, auto_map={"AutoTokenizer": names}, tokenizer_class="TheirTokenizer")
    return folder


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.slow
def test_nothing_is_asked_on_a_terminal_and_no_code_runs(tmp_path: Path) -> None:
    folder = folder_with_code(tmp_path / "model", "theirs")
    arguments = ("recipes/generate_text.py", "--model", folder, "--prompt", "a", "--max-tokens", 1)
    exit_code, output = on_a_terminal(*arguments)
    assert not (folder / "ran").exists(), output
    assert "[y/N]" not in output
    assert exit_code == 2, output
    assert str(folder) in output


def test_code_of_an_unknown_family_does_not_run(tmp_path: Path) -> None:
    folder = folder_with_code(tmp_path / "model", "theirs", tokenizer=True)
    for load in (lambda: load_model(folder, "auto", "cpu"), lambda: load_tokenizer(folder)):
        with pytest.raises(UserError, match=str(folder)):
            load()
    assert not (folder / "ran").exists()


def test_a_known_family_is_loaded_plainly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_with_code(tmp_path / "model", None, tokenizer=True)
    with caplog.at_level("INFO"):
        model = load_model(folder, "auto", "cpu")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert type(model).__module__.startswith("transformers.models.qwen3.")
    assert str(folder / "config.json") in caplog.text  # a reader learns that the code was left out
    plain = load_tokenizer(plain_folder(tmp_path / "plain"))
    assert load_tokenizer(folder)("ab")["input_ids"] == plain("ab")["input_ids"]
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=str(folder)):
        load_tokenizer(folder)
    assert not (folder / "ran").exists()


def test_a_hybrid_names_no_code_but_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The card asks for trust_remote_code=True, which would run any other code too."""
    dense, hybrid = folder_with_code(tmp_path / "dense", None, tokenizer=True), tmp_path / "hybrid"
    change(dense / "config.json", auto_map={**CLASSES, "AutoTokenizer": "code.TheirTokenizer"})
    materialize(dense, record_for(dense), hybrid)
    assert json.loads((hybrid / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "modeling_bosch.BoschQwen3Config",
        "AutoModelForCausalLM": "modeling_bosch.BoschQwen3ForCausalLM",
    }
    assert "auto_map" not in json.loads((hybrid / "tokenizer_config.json").read_text())
    caplog.clear()
    with caplog.at_level("INFO"):
        load_tokenizer(hybrid)
        model = load_model(hybrid, "auto", "cpu")
    assert type(model).__module__ == "bosch.families.qwen3"
    assert "code" not in caplog.text
    assert not (dense / "ran").exists()


def test_lm_eval_gets_no_folder_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface", "lm_eval.tasks"):
        module = ModuleType(name)
        vars(module).update(simple_evaluate=None, HFLM=None, TaskManager=None)
        monkeypatch.setitem(sys.modules, name, module)
    folder = folder_with_code(tmp_path / "model", None, tokenizer=True)
    model, tokenizer = load_model(folder, "auto", "cpu"), load_tokenizer(folder)
    plan = EvaluationPlan((), lm_eval_tasks=("niah_single_1",))
    with pytest.raises(UserError, match=str(folder)):
        run_lm_eval(model, tokenizer, plan, Label.__new__(Label), tmp_path / "out", None)


def test_every_load_says_that_no_code_is_run() -> None:
    """`trust_remote_code=False`, or `**LOCAL` (bosch/model.py), in every call that could ask."""
    calls = 0
    for top in ("bosch", "data", "eval", "training", "recipes", "benchmarks", "launch"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                name = getattr(getattr(node, "func", None), "attr", None)
                if isinstance(node, ast.Call) and name in ("from_pretrained", "from_config"):
                    calls += 1
                    text = ast.unparse(node)
                    assert "LOCAL" in text or "trust_remote_code=False" in text, (path, text)
    assert calls > 10
