"""Wrong command lines as programs: torch must not be imported for a mistake that the command line
alone shows, nor for a help text."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bosch.__main__ import PROGRAMS
from tests.sampled import sampled
from tests.wrong_inputs import check, make_files
from tests.wrong_lines import SMALL, WRONG_LINES


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_files(folder)
    return folder


# Mistakes that the command line alone shows: a process with a startup of its own, without torch.
WITHOUT_TORCH = [
    "recovr",
    "recover --ratoi .5",
    "recover --model notes.txt",
    "calibrate --examples 0",
    f"train --model {SMALL} --out out --tokens-from nowhere",
    "evaluate --suite niha",
    "compare nowhere",
    f"generate --model {SMALL}",
    "mask show broken.json",
]
PROGRAM = """
import sys
from bosch.__main__ import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def run_program(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
        capture_output=True,
    )


@pytest.mark.parametrize("line", sampled(WITHOUT_TORCH, slice(None, None, 4)))
def test_a_mistake_in_the_command_line_loads_no_torch(line: str, inputs: Path) -> None:
    done = run_program(inputs, *shlex.split(line))
    check(done.returncode, done.stdout, done.stderr, line, WRONG_LINES[line])


@pytest.mark.parametrize("program", sampled(["", *PROGRAMS, "mask show"], slice(0, 3)))
def test_help_loads_no_torch(program: str, inputs: Path) -> None:
    done = run_program(inputs, *program.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--help" in done.stdout
    assert "python recipes/" not in done.stdout
