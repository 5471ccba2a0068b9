"""How a user's mistake, a user's Ctrl-C, and a reader that leaves end a command; and what every
command sets before it imports torch."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bosch.run.errors import MissingFileError, UserError, as_sentence, exit_on_user_error
from bosch.training.checkpoint import explain_refusal
from tests.small_disk import small_disk

PROGRAM = """
import sys
from bosch.run.errors import exit_on_user_error

def work():
    print("ready", flush=True)
    sys.stdin.read()
    print("x" * 10**6)

exit_on_user_error(work, debug=False)
"""


def start() -> Any:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_ctrl_c_ends_in_one_sentence_and_the_shells_exit_code() -> None:
    with start() as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.startswith("interrupted")
    assert errors.count("\n") == 1


def test_a_reader_that_leaves_early_sees_no_traceback() -> None:
    with start() as process:
        assert process.stdout.readline() == "ready\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_a_users_error_ends_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: Exception) -> None:
        raise error

    for error in (UserError("why"), MissingFileError("why"), OSError(errno.EEXIST, "there")):
        with pytest.raises(SystemExit) as stop:
            exit_on_user_error(lambda error=error: fail(error), debug=False)
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"error: {error}\n"
        with pytest.raises(type(error)):
            exit_on_user_error(lambda error=error: fail(error), debug=True)
    with pytest.raises(ValueError, match="a bug"):
        exit_on_user_error(lambda: fail(ValueError("a bug")), debug=False)


def test_a_full_disk_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a file is opened, which the system names, and where it is written."""
    remedy = "no space left on device. Free some space and run the same command again: it goes on."
    with small_disk(tmp_path / "disk", kilobytes=16) as disk:
        path = disk / "text"

        def fill() -> None:
            path.write_bytes(bytes(10**6))

        with pytest.raises(SystemExit):
            exit_on_user_error(fill, debug=False)
    assert capsys.readouterr().err == f"error: {remedy}\n"
    named = OSError(errno.EDQUOT, "Disk quota exceeded", str(path))
    assert as_sentence(named) == (
        f"{path}: disk quota exceeded. Free some space and run the same command again: it goes on."
    )
    with pytest.raises(UserError) as stop, explain_refusal("the checkpoint"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert as_sentence(stop.value) == f"the checkpoint cannot be written: {remedy}"


@pytest.mark.parametrize(
    ("chosen", "imports_torch_first"),
    [
        pytest.param(None, False, marks=pytest.mark.slow),
        pytest.param(None, True, marks=pytest.mark.slow),
        pytest.param("PYTORCH_ALLOC_CONF", False, marks=pytest.mark.slow),
        ("PYTORCH_CUDA_ALLOC_CONF", False),
    ],
)
def test_gpu_memory_grows_in_segments_unless_the_user_says_otherwise(
    chosen: str | None, imports_torch_first: bool
) -> None:
    """As torch itself has read it in a command. A process that the command starts reads the
    variable, as the command does where the user has set it."""
    name = chosen or "PYTORCH_ALLOC_CONF"
    ask = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    if chosen == "PYTORCH_CUDA_ALLOC_CONF":  # an older name, which torch reads too
        ask = f"import os; print(os.environ.get('PYTORCH_ALLOC_CONF', os.environ[{name!r}]))"
    told = f"import os; print(os.environ[{name!r}])"
    program = f"import subprocess, sys\n{'import torch' if imports_torch_first else ''}\n"
    program += "from bosch.run.errors import run_main\n"
    program += f"ask, told = {ask!r}, {told!r}\n"
    program += "run_main(lambda _: (exec(ask), subprocess.run([sys.executable, '-c', told])))"
    environment = {name: text for name, text in os.environ.items() if "ALLOC_CONF" not in name}
    own = "max_split_size_mb:64"
    environment |= {"PYTHONUNBUFFERED": "1"} | ({chosen: own} if chosen else {})
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [own if chosen else "expandable_segments:True"] * 2
