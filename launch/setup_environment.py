"""Makes `.venv` and installs this project into it, or finds that it is up to date and leaves it.

Run by the Makefile with the machine's own Python, so it needs nothing but the standard library:
    python3 launch/setup_environment.py [--plan] [EXTRA ...]          for example: dev eval

`.venv/setup.json` records what was installed. It says "not finished" before anything else is
written and is finished last, so a set-up that was killed is never taken for a whole one.
"""

from __future__ import annotations  # lets a Python that is too old reach the sentence that says so

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
RECORD_FILE = ENVIRONMENT / "setup.json"
OLDEST_PYTHON = (3, 11)
NEEDED_MODULES = ("pip", "torch", "transformers", "accelerate")

# Asked of the environment's interpreter; -I keeps PYTHONPATH and the working folder out of it.
PROBE = """
import importlib.util, json, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps([sys.version_info[:2], missing]))
"""


@dataclass(frozen=True)
class Record:
    """What `.venv/setup.json` holds."""

    finished: bool
    folder: str  # scripts in .venv/bin name their folder: in a checkout that was moved they break
    fingerprint: str
    extras: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plan", action="store_true", help="say what would be done; do nothing")
    parser.add_argument("extras", nargs="*", help="optional parts named in pyproject.toml")
    arguments = parser.parse_args()
    check_python(sys.version_info[:2], has_ensurepip=find_spec("ensurepip") is not None)
    if arguments.plan:
        print(": ".join(decide(arguments.extras)))
        return
    with locked() as lock:
        action, reason = decide(arguments.extras)
        print(f"set-up: {action} .venv ({reason})", flush=True)
        if action != "reuse":
            install(arguments.extras, lock, from_nothing=action == "build")


def check_python(version: tuple[int, int], has_ensurepip: bool) -> None:
    found = f"{version[0]}.{version[1]}"
    if version < OLDEST_PYTHON:
        sys.exit(
            f"Python 3.11 or newer is needed, and {sys.executable} is {found}. "
            "Name another one: make recover PYTHON=python3.12"
        )
    if not has_ensurepip:
        sys.exit(
            f"{sys.executable} cannot make virtual environments. On Debian and Ubuntu install "
            f"the part they split off: apt install python{found}-venv"
        )


def decide(extras: list[str]) -> tuple[str, str]:
    """`reuse`, `update` (with pip) or `build` (from nothing), and why. Changes nothing."""
    if not (ENVIRONMENT / "bin").is_dir():
        return "build", "there is none"
    try:
        record = read_record()
    except (ValueError, TypeError):
        return "build", "its setup.json cannot be read"
    if record and not record.finished:
        return "build", "the last set-up did not finish"
    if record and record.folder != str(ENVIRONMENT):
        return "build", f"it was made in {record.folder}"
    answer = probe()
    if answer is None:
        return "build", "its Python does not run"
    version, missing = answer
    if version != sys.version_info[:2]:
        return "build", f"its Python is {version[0]}.{version[1]}, {sys.executable} is another"
    if missing and (record or "pip" in missing):
        return "build", f"it lacks {', '.join(missing)}"
    if record is None:
        return "update", "this set-up did not make it"
    if record.fingerprint != fingerprint():
        return "update", "what has to be installed has changed"
    if absent := sorted(set(extras) - set(record.extras)):
        return "update", f"it lacks the extras {', '.join(absent)}"
    return "reuse", "it is up to date"


def install(extras: list[str], lock: int, from_nothing: bool) -> None:
    previous = None if from_nothing else read_record()
    extras = sorted({*extras, *(previous.extras if previous else [])})
    record = Record(False, str(ENVIRONMENT), fingerprint(), extras)
    write_record(record)
    if from_nothing:
        remove_contents()
        venv.EnvBuilder(with_pip=True, symlinks=True).create(ENVIRONMENT)
    python = str(ENVIRONMENT / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    if is_linux_without_gpu():
        explain_cuda_download(pip)
    project = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    # pip inherits the lock: when only this process is killed, the next set-up waits for pip too.
    command = [*pip, "install", "--editable", project]
    if subprocess.run(command, pass_fds=[lock], check=False).returncode:
        sys.exit("set-up: pip could not install the packages; its own message is above")
    if subprocess.run([python, "-I", "-c", "import torch, transformers"], check=False).returncode:
        sys.exit("set-up: the packages cannot be imported, for the reason above")
    write_record(Record(True, record.folder, record.fingerprint, extras))


@contextlib.contextmanager
def locked() -> Iterator[int]:
    """One set-up at a time. The system drops the lock of a process that dies."""
    ENVIRONMENT.mkdir(exist_ok=True)
    lock = os.open(ENVIRONMENT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("set-up: another one is at work on .venv; waiting for it", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield lock
    finally:
        os.close(lock)


def fingerprint() -> str:
    """Hash of what decides the contents: the installing part of pyproject.toml, and this file."""
    settings = read_settings()
    asked = [settings["build-system"], settings["project"], settings.get("tool", {})["setuptools"]]
    text = json.dumps(asked, sort_keys=True)
    return hashlib.sha256(text.encode() + Path(__file__).read_bytes()).hexdigest()


def read_settings() -> dict[str, Any]:
    import tomllib  # part of Python from 3.11 on; check_python has run by now

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def read_record() -> Record | None:
    return Record(**json.loads(RECORD_FILE.read_text())) if RECORD_FILE.exists() else None


def write_record(record: Record) -> None:
    temporary = RECORD_FILE.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(record), indent=1))
    os.replace(temporary, RECORD_FILE)


def remove_contents() -> None:
    """All but the record: it says "not finished", and has to outlive a kill in the middle."""
    for path in ENVIRONMENT.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != RECORD_FILE:
            path.unlink()


def probe() -> tuple[tuple[int, int], list[str]] | None:
    """The environment's Python version and the modules it lacks; None when it does not run."""
    command = [str(ENVIRONMENT / "bin" / "python"), "-I", "-c", PROBE, *NEEDED_MODULES]
    try:
        answer = subprocess.run(command, capture_output=True, check=True).stdout
        (major, minor), missing = json.loads(answer)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return (major, minor), missing


def is_linux_without_gpu() -> bool:
    """Where pip could fetch CUDA packages that nothing here can use."""
    driver = Path("/proc/driver/nvidia/version")
    return sys.platform == "linux" and not driver.exists() and not shutil.which("nvidia-smi")


def explain_cuda_download(pip: list[str]) -> None:
    """Without a GPU: say it when pip is about to fetch CUDA packages, and what changes that."""
    dependencies = read_settings()["project"]["dependencies"]
    torch = next(line for line in dependencies if re.match(r"torch\b", line))
    command = [*pip, "install", "--dry-run", "--quiet", "--no-deps", "--report", "-", torch]
    answer = subprocess.run(command, capture_output=True, check=False)
    if answer.returncode == 0:  # where it fails, the installation fails the same way and says why
        print(describe_cuda_download(json.loads(answer.stdout)), end="", flush=True)


def describe_cuda_download(report: dict[str, Any]) -> str:
    """From pip's report on torch: what to print, nothing where its build needs no CUDA packages."""
    for metadata in (package["metadata"] for package in report["install"]):
        needed = [re.split(r"[^\w.-]", line)[0] for line in metadata.get("requires_dist", [])]
        if cuda := [name for name in needed if name.startswith(("nvidia-", "cuda-"))]:
            return (
                f"set-up: no NVIDIA GPU was found, but the torch {metadata['version']} that pip "
                f"sees is built for CUDA.\n  pip will download it with {', '.join(cuda)}: several "
                "GB.\n  For the small CPU build press Ctrl-C, set PIP_EXTRA_INDEX_URL to PyTorch's "
                "CPU wheel index\n  (pytorch.org > Get Started > CPU) and run the command again.\n"
            )
    return ""


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("set-up: stopped; run the same command again to go on")
