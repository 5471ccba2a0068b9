"""A method is one new file: the example of docs/extending.md and broken versions of it, through the
command line.
"""

import json
import re
from pathlib import Path

import pytest

from bosch.masks.mask import read_mask
from tests.package_copy import PackageCopy, example_of_page

MODEL = ("--model", "tiny-qwen3-2layer")
SEARCH = ("bosch.recipes.search_mask", *MODEL, "--ratio", "0.5", "--sink", "none")
EXAMPLE = example_of_page("bosch/methods/mine.py")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> PackageCopy:
    return PackageCopy(tmp_path_factory.mktemp("package") / "copy")


def test_the_example_of_the_page_makes_a_mask(copy: PackageCopy, tmp_path: Path) -> None:
    copy.write("bosch/methods/mine.py", EXAMPLE)
    code, out, errors = copy.run("bosch.recipes.search_mask", "--list")
    assert code == 0, errors
    assert re.search(r"^mine +Upper layers stay full: an example of a method\.$", out, re.M)

    run = tmp_path / "run"
    code, _, errors = copy.run(*SEARCH, "--method", "mine", "--step", "2", "--run-dir", str(run))
    assert code == 0, errors
    record = read_mask(run / "mask" / "mask.json")
    assert (record.method, record.settings["step"]) == ("mine", 2.0)
    lower, upper = record.mask.z
    assert (set(lower), set(upper)) == ({0}, {1})
    scores = json.loads((run / "mask" / "scores.json").read_text())
    assert [set(layer) for layer in scores["groups"]] == [{0.0}, {2.0}]


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("reads_calibration=False", "read_calibration=False", "'read_calibration'"),
        ("def score_groups", "def score_group", "score_groups(inputs)"),
        ("@dataclass(frozen=True)\n", "", "dataclass"),
    ],
)
def test_mistakes(copy: PackageCopy, tmp_path: Path, right: str, wrong: str, named: str) -> None:
    assert right in EXAMPLE
    file = copy.write("bosch/methods/broken.py", EXAMPLE.replace(right, wrong))
    code, _, errors = copy.run(*SEARCH, "--method", "broken", "--run-dir", str(tmp_path / "run"))
    assert code == 2, errors
    [line] = errors.splitlines()
    assert line.startswith(f"error: {file}")
    assert named in line
    assert not (tmp_path / "run").exists()


def test_a_bug_in_the_method_keeps_its_traceback(copy: PackageCopy, tmp_path: Path) -> None:
    """Even if it raises a ValueError, as mistakes of the user do."""
    bug = EXAMPLE.replace("inputs.settings.step", "list(zip([1], [1, 2], strict=True))[0]")
    file = copy.write("bosch/methods/buggy.py", bug)
    code, _, errors = copy.run(*SEARCH, "--method", "buggy", "--run-dir", str(tmp_path / "run"))
    assert code == 1
    assert "Traceback (most recent call last)" in errors
    assert str(file) in errors
    assert "ValueError: zip()" in errors
    assert "error: zip" not in errors.splitlines()
