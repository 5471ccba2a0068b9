"""Wrong command lines and inputs of every program: exit code 2, one sentence that names the value,
no traceback, no new file or folder, and every file as before."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.__main__
from bosch.__main__ import PROGRAMS, start
from bosch.run.errors import run_main
from tests.sampled import sampled
from tests.wrong_inputs import check, make_inputs
from tests.wrong_lines import SMALL, WRONG_LINES


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


def contents(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Every file with its size and time, and every folder. In a folder that was there before, the
    lock and the log of a run that began are no results."""
    return {
        str(path): None if path.is_dir() else (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.name.startswith(".lock") and path.name != "recover.log"
    }


def test_every_program_is_among_them() -> None:
    assert {line.split()[0] for line in WRONG_LINES} >= PROGRAMS.keys()


@pytest.mark.parametrize(("line", "words"), sampled(WRONG_LINES.items(), slice(None, None, 3)))
def test_a_wrong_command_ends_in_one_sentence_and_leaves_the_files(
    line: str,
    words: str,
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(sys, "argv", ["bosch"])  # the command sets it
    before = contents(inputs)
    with pytest.raises(SystemExit) as stop:
        start("bosch", shlex.split(line))
    printed = capsys.readouterr()
    check(stop.value.code, printed.out, printed.err, line, words)
    assert contents(inputs) == before


def test_wrong_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks", "latency", "--windw", "3"])
    with pytest.raises(SystemExit) as stop:
        run_main(benchmarks.__main__.main)
    printed = capsys.readouterr()
    check(stop.value.code, printed.out, printed.err, "latency --windw 3", "--windw --window")


# Mistakes that the command line alone shows: torch is not imported for them.
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
