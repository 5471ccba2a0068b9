"""A backend is one new file: the example of docs/extending.md through the command line."""

import json
import re
from pathlib import Path

import pytest

from tests.package_copy import PackageCopy

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
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
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    [example] = [block for block in blocks if block.startswith("# bosch/backends/mine.py\n")]
    copy = PackageCopy(tmp_path_factory.mktemp("copy"))
    copy.write("bosch/backends/mine.py", example + COUNTING)
    return copy


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTENTION_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def test_training_search_and_evaluation_run_on_the_example(
    copy: PackageCopy, tmp_path: Path, calls: Path
) -> None:
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


@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [
        ("search_mask", ("--preset", "smoke", "--attention", "mien")),
        ("evaluate_model", ("--model", MODEL, "--attention", "mien")),
        ("recover", ("--preset", "smoke", "--zero-shot", "--eval.attention", "flex")),
    ],
)
def test_a_backend_that_cannot_run_here_ends_the_command_before_work_begins(
    copy: PackageCopy, tmp_path: Path, recipe: str, arguments: tuple[str, ...]
) -> None:
    option, name = arguments[-2:]
    out = {"evaluate_model": "--out"}.get(recipe, "--run-dir")
    code, _, errors = copy.run(f"bosch.recipes.{recipe}", *arguments, out, str(tmp_path / "out"))
    assert code == 2
    [line] = errors.splitlines()
    assert line.startswith("error: ")
    assert f"{option.split('.')[-1].removeprefix('--')} {name}" in line
    assert ("'mine'" in line) == (name == "mien")
    assert not list(tmp_path.iterdir())
