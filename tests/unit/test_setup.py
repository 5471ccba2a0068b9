"""The set-up behind `make recover` and `make test`: what it reuses, repairs and announces.

Each checkout here is small and set up by real processes. The packages it requires are wheels of a
few bytes in a folder, so that nothing is downloaded.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from launch import setup_environment
from launch.setup_environment import check_python, is_linux_without_gpu
from tests.unit.tiny_wheel import write_wheel

REPOSITORY = Path(__file__).parents[2]

PROJECT = """
[build-system]
requires = []
build-backend = "tiny_wheel"
backend-path = ["."]
[project]
name = "toy"
version = "1"
dependencies = ["torch>=2", "transformers", "accelerate"]
[project.optional-dependencies]
dev = []
[tool.setuptools]
"""


def new_checkout(folder: Path) -> Path:
    (folder / "launch").mkdir(parents=True)
    shutil.copy(REPOSITORY / "launch" / "setup_environment.py", folder / "launch")
    shutil.copy(REPOSITORY / "tests" / "unit" / "tiny_wheel.py", folder)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "launch" / "constraints.txt").write_text("torch==2.13.0\n")
    (folder / "wheels").mkdir()
    for name, version in {"torch": "2.13.0+cpu", "transformers": "5.17", "accelerate": "1"}.items():
        write_wheel(folder / "wheels", name, version)
    return folder


def start(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(checkout), "PIP_NO_INDEX": "1"}
    environment |= {"PIP_FIND_LINKS": "wheels", "PIP_CONFIG_FILE": os.devnull}
    how: Any = {"cwd": checkout, "env": environment, "text": True, "start_new_session": True}
    command = [sys.executable, "launch/setup_environment.py", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)


def run(checkout: Path, *arguments: str, status: int = 0) -> str:
    process = start(checkout, *arguments)
    output, _ = process.communicate()
    assert process.returncode == status, output
    return output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that was set up without extras."""
    checkout = new_checkout(tmp_path_factory.mktemp("setup") / "made")
    told = run(checkout)
    assert "build .venv (there is none)" in told
    assert ("set PIP_EXTRA_INDEX_URL" in told) == is_linux_without_gpu()
    return checkout


@pytest.fixture
def copied(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same in another folder, as if it had been set up there; what this process looks at."""
    checkout = shutil.copytree(made, tmp_path / "copied", symlinks=True)
    change_folder(checkout, str(checkout / ".venv"))
    monkeypatch.setattr(setup_environment, "ROOT", checkout)
    return checkout


def change_folder(checkout: Path, folder: str) -> None:
    path = checkout / ".venv" / "setup.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"folder": folder}))


@pytest.mark.slow
def test_a_second_setup_reuses_the_first_until_extras_or_requirements_change(made: Path) -> None:
    assert run(made) == "set-up: reuse .venv (it is up to date)\n"
    assert "update .venv (it lacks the extras dev)" in run(made, "dev")
    assert "reuse" in run(made, "dev")
    assert "reuse" in run(made), "an environment that has more serves a command that asks for less"
    project = made / "pyproject.toml"
    project.write_text(PROJECT.replace("torch>=2", "torch>=2.1"))
    assert "update .venv (the requirements have changed)" in run(made)
    assert "reuse" in run(made, "dev"), "an update keeps the extras that were there"
    project.write_text(project.read_text() + "\n[tool.ruff]\n")
    assert "reuse" in run(made), "settings of a linter install nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "action", "reason"),
    [
        (lambda c: change_folder(c, "/moved/.venv"), "build", "it was made in /moved/.venv"),
        (lambda c: (c / ".venv/setup.json").write_text("{"), "build", "the last set-up did not"),
        (lambda c: (c / ".venv/setup.json").unlink(), "update", "this set-up did not create it"),
        (lambda c: (c / ".venv/bin/python").unlink(), "build", "its Python does not run"),
        (
            lambda c: (c / "launch/constraints.txt").write_text("torch>=2.13\n"),
            *("update", "the requirements have changed"),
        ),
    ],
)
def test_what_is_wrong_is_named(copied: Path, damage: Any, action: str, reason: str) -> None:
    damage(copied)
    decided, why = setup_environment.decide(copied / ".venv", [])
    assert decided == action
    assert reason in why


def test_an_environment_of_another_program_is_left_alone(tmp_path: Path) -> None:
    """As `uv venv` makes: without pip."""
    venv.create(tmp_path / ".venv", with_pip=False)
    with pytest.raises(SystemExit, match=r"\.venv is of another program"):
        setup_environment.decide(tmp_path / ".venv", [])
    assert (tmp_path / ".venv" / "bin" / "python").exists()
    # Also where a set-up into it was stopped.
    record = {"finished": False, "made": False, "extras": [], "folder": "", "fingerprint": ""}
    (tmp_path / ".venv" / "setup.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit, match=r"\.venv is of another program"):
        setup_environment.decide(tmp_path / ".venv", [])


@pytest.mark.slow
def test_killed_setup_is_repaired_by_the_one_that_waited_for_it(tmp_path: Path) -> None:
    checkout = new_checkout(tmp_path / "checkout")
    for pipe in ("hold", "never"):
        os.mkfifo(checkout / pipe)
    first = start(checkout)
    keep = os.open(checkout / "never", os.O_RDWR)  # a writer, lest the backend read an end
    with (checkout / "hold").open() as hold:
        assert hold.read(5) == "begun"
    second = start(checkout)
    assert second.stdout is not None
    assert "waiting for it" in second.stdout.readline()
    (checkout / "hold").unlink()
    os.killpg(first.pid, signal.SIGKILL)  # pip too: while it lives, it holds the lock
    output, _ = second.communicate()
    os.close(keep)
    first.communicate()
    assert second.returncode == 0, output
    assert "build .venv (the last set-up did not finish)" in output
    assert "reuse" in run(checkout)


def test_the_tested_versions_are_installed_or_named(copied: Path) -> None:
    (copied / "launch" / "constraints.txt").write_text("torch==99.0\n")
    last = run(copied, status=1).splitlines()[-1]
    assert last.startswith("set-up: ")
    assert "launch/constraints.txt" in last


@pytest.mark.slow
def test_both_ends_of_the_ranges_have_their_own_environments(made: Path) -> None:
    lowest = setup_environment.versions(REPOSITORY / ".venv-oldest").split()
    assert {"torch==2.11", "transformers==5.17"} <= set(lowest)
    assert setup_environment.versions(REPOSITORY / ".venv-newest") == ""
    assert "build .venv-newest (there is none)" in run(made, "newest")
    assert "update .venv-newest (there may be newer packages)" in run(made, "newest")


def test_unsuitable_python_is_one_sentence() -> None:
    with pytest.raises(SystemExit, match=r"3\.11 or newer is needed.*is 3\.9.*PYTHON="):
        check_python((3, 9), has_ensurepip=True)
    with pytest.raises(SystemExit, match=r"apt install python3\.12-venv"):
        check_python((3, 12), has_ensurepip=False)
    check_python((3, 11), has_ensurepip=True)
