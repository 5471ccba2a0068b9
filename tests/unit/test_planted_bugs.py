"""A bug of ours or of a plug-in is no mistake of the user: it ends a command with a traceback that
names the line, and exit code 1. The bugs are ValueErrors, like the errors that are the user's."""

from pathlib import Path

import pytest

from tests.fork_server import launch_environment
from tests.package_copy import PackageCopy

# What each planted function does. `zip` raises a ValueError: the lengths differ.
BUG = "    return list(zip([1], [1, 2], strict=True))\n"

METHOD = f'''"""A ranking with a bug: for a test."""

from dataclasses import dataclass

from bosch.method import Inputs, MethodTraits, Scores

traits = MethodTraits(reads_calibration=False)


@dataclass(frozen=True)
class Settings:
    """None."""


def score_groups(inputs: Inputs) -> Scores:
{BUG}'''

MODEL = ("--model", "tiny-qwen3-2layer")
TRAIN = ("bosch.recipes.train_model", *MODEL, "--tokens-from", "tokens", "--out", "train")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> PackageCopy:
    return PackageCopy(tmp_path_factory.mktemp("planted") / "copy")


def check_traceback(errors: str, file: Path, line: int) -> None:
    assert "Traceback (most recent call last)" in errors
    assert f'"{file}", line {line}, in ' in errors
    assert "ValueError: zip()" in errors
    assert "error: zip" not in errors.splitlines()


def test_a_bug_in_a_method_keeps_its_traceback(copy: PackageCopy) -> None:
    file = copy.write("bosch/methods/planted.py", METHOD)
    search = ("bosch.recipes.search_mask", *MODEL, "--method", "planted", "--run-dir", "run")
    code, _, errors = copy.run(*search)
    assert code == 1, errors
    check_traceback(errors, file, METHOD.count("\n"))


@pytest.mark.slow
def test_a_bug_in_the_training_loop_keeps_its_traceback_and_ends_the_other_rank(
    copy: PackageCopy,
) -> None:
    options = "--tokens 4k --seq-len 128 --held-out-sequences 2 --workers 1 --out tokens"
    code, _, errors = copy.run("bosch.recipes.prepare_tokens", *MODEL, *options.split())
    assert code == 0, errors
    planted = (
        "\n\nimport os\n\n\ndef learning_rate(*_):\n"
        f"    if os.environ['RANK'] == '1':\n        return 1e-3\n{BUG}"
    )
    file, line = copy.append("bosch/training/loop.py", planted)
    ranks = [
        copy.start(*TRAIN, "--batch-sequences", "2", **variables)
        for variables in launch_environment(2)
    ]
    first, other = [rank.communicate(timeout=300)[1] for rank in ranks]
    check_traceback(first, file, line + 8)
    assert [rank.returncode for rank in ranks] == [1, 1], other
