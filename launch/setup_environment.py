"""Creates `.venv` and installs this project into it, or reuses it if it is up to date.

The Makefile runs this with the machine's own Python, so it needs only the standard library:
    python3 launch/setup_environment.py [EXTRA ...]          for example: dev eval
    python3 launch/setup_environment.py oldest [EXTRA ...]

`.venv` gets the versions of launch/constraints.txt, with which everything is tested. `oldest` makes
`.venv-oldest` with the lowest versions that pyproject.toml admits, `newest` `.venv-newest` with the
highest.

`.venv/setup.json` records what was installed. It says "not finished" while pip runs and is marked
finished last, so a set-up that was killed is never taken for a complete one. An extra X whose build
needs torch has a partner X-build, and comes after that: if it fails, .venv is complete without it.
"""

from __future__ import annotations  # so that a Python that is too old reaches the message about it

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = "setup.json"
SOURCES = {  # environment -> the file that decides its versions
    ".venv": "launch/constraints.txt",
    ".venv-oldest": "pyproject.toml",
    ".venv-newest": "pyproject.toml",
}
# Run by the environment's interpreter; -I keeps PYTHONPATH and the working folder out of it.
PROBE = "import sys, importlib.util as u; print(sys.version_info[:2], all(map(u.find_spec, {})))"


def main(extras: list[str]) -> None:
    if any(extra.startswith("-") for extra in extras):
        sys.exit(__doc__)
    check_python(sys.version_info[:2], has_ensurepip=find_spec("ensurepip") is not None)
    environment = ROOT / ".venv"
    if extras and f".venv-{extras[0]}" in SOURCES:
        environment, extras = ROOT / f".venv-{extras[0]}", extras[1:]
    try:
        environment.mkdir(exist_ok=True)
    except OSError as error:  # a folder that may not be written, or a file of this name
        sys.exit(f"{environment} cannot be made: {error.strerror}.")
    lock = os.open(environment, os.O_RDONLY)  # the system drops the lock of a process that dies
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"set-up: another one is running on {environment.name}; waiting for it", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    action, reason = decide(environment, extras)
    print(f"set-up: {action} {environment.name} ({reason})", flush=True)
    if action != "reuse":
        install(environment, extras, lock, from_nothing=action == "build")


def check_python(version: tuple[int, int], has_ensurepip: bool) -> None:
    running = f"{version[0]}.{version[1]}"
    if version < (3, 11):
        sys.exit(
            f"Python 3.11 or newer is needed, and {sys.executable} is {running}. "
            "Name another one: make recover PYTHON=python3.12"
        )
    if not has_ensurepip:
        sys.exit(
            f"{sys.executable} cannot create virtual environments; on Debian and Ubuntu: "
            f"apt install python{running}-venv"
        )


def decide(environment: Path, extras: list[str]) -> tuple[str, str]:
    """`reuse`, `update` (with pip) or `build` (from nothing), and why. Changes nothing."""
    if not (environment / "bin").is_dir():
        return "build", "there is none"
    record = read_record(environment)
    is_ours = record is not None and record.get("made", True)
    if is_ours and record is not None and not record.get("finished"):
        return "build", "the last set-up did not finish"
    if is_ours and record and record["folder"] != str(environment):
        # Scripts in .venv/bin contain its path.
        return "build", f"it was made in {record['folder']}"
    needed = ("pip", "torch", "transformers", "accelerate") if is_ours else ("pip",)
    try:
        probe = [f"{environment}/bin/python", "-I", "-c", PROBE.format(needed)]
        answer = subprocess.check_output(probe, text=True)
    except (OSError, subprocess.CalledProcessError):
        answer = ""
    if answer != f"{sys.version_info[:2]} True\n":
        problem = f"its Python does not run, is another or lacks {' or '.join(needed)}"
        if not is_ours:  # a user's own, as `uv venv` makes
            sys.exit(
                f"set-up: {environment} is of another program, and {problem}. Move it away, or "
                "install into it by yourself: pip install -e '.[eval]'"
            )
        return "build", problem
    if record is None:
        return "update", "this set-up did not create it"
    if not record.get("finished"):
        return "update", "the last set-up did not finish"
    if record["fingerprint"] != fingerprint(environment):
        return "update", "the requirements have changed"
    if absent := sorted(set(extras) - set(record["extras"])):
        return "update", f"it lacks the extras {', '.join(absent)}"
    if environment.name == ".venv-newest":
        return "update", "there may be newer packages"
    return "reuse", "it is up to date"


def install(environment: Path, extras: list[str], lock: int, from_nothing: bool) -> None:
    previous = (not from_nothing and read_record(environment)) or {"extras": [], "made": False}
    previous = {"made": True} | previous  # records of earlier versions do not say
    wanted, optional = {*extras, *previous["extras"]}, project()["optional-dependencies"]
    built_last = sorted(extra for extra in wanted if f"{extra}-build" in optional)
    extras = sorted(wanted - {*built_last} | {f"{extra}-build" for extra in built_last})
    record_file, python = environment / RECORD, f"{environment}/bin/python"
    record: dict[str, Any] = {"folder": str(environment), "fingerprint": fingerprint(environment)}
    # What this set-up has not made it never builds anew: all that a user has installed would go.
    record |= {"extras": extras, "made": from_nothing or bool(previous.get("made", False))}
    if from_nothing:
        # A kill in between must leave what the next set-up repairs: what has no bin is none, and
        # a record that says unfinished stands before anything else.
        builder = venv.EnvBuilder(with_pip=True, symlinks=True)
        shutil.rmtree(environment / "bin", ignore_errors=True)
        builder.clear_directory(environment)
        record_file.write_text(json.dumps(record | {"finished": False}))
        builder.create(environment)
    record_file.write_text(json.dumps(record | {"finished": False}))
    (environment / "constraints.txt").write_text(versions(environment))
    # Only pip's errors are shown: it also warns of the machine's own settings.
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-qq"]
    pip += ["--constraint", f"{environment}/constraints.txt"]
    if environment.name == ".venv-newest":
        pip += ["--upgrade", "--upgrade-strategy", "eager"]
    if is_linux_without_gpu() and not os.environ.keys() & {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"}:
        print(
            "set-up: no NVIDIA GPU was found, but pip may download a torch built for CUDA: several "
            "GB.\n  For the small CPU build press Ctrl-C, set PIP_EXTRA_INDEX_URL to PyTorch's CPU "
            "wheel index\n  (pytorch.org > Get Started > CPU) and run the command again.",
            flush=True,
        )
    print("set-up: downloading and installing packages takes minutes", flush=True)
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    # pip inherits the lock: when only this process is killed, the next set-up waits for pip too.
    if subprocess.run([*pip, "--editable", target], pass_fds=[lock]).returncode:
        sys.exit(
            f"set-up: pip could not install the versions of {SOURCES[environment.name]}; its "
            "message is above. If they do not exist for your Python or machine, change that file"
        )
    if subprocess.run([python, "-I", "-c", "import torch, transformers"]).returncode:
        sys.exit("set-up: the installed packages cannot be imported; the reason is above")
    record_file.write_text(json.dumps(record | {"finished": True}))
    for extra in built_last:
        # Without isolation the build sees .venv's torch.
        packages = ["--no-build-isolation", *optional[extra]]
        if subprocess.run([*pip, *packages], pass_fds=[lock]).returncode:
            sys.exit(
                f"set-up: .venv is complete but for the extra {extra}, which pip could not build; "
                "its message is above. Nothing needs it: torch's own kernels run instead"
            )
        extras.append(extra)
        record_file.write_text(json.dumps(record | {"finished": True}))


def fingerprint(environment: Path) -> str:
    text = requirements() + versions(environment) + Path(__file__).read_text()
    return hashlib.sha256(text.encode()).hexdigest()


def versions(environment: Path) -> str:
    """Constraints for pip: the tested set, the lower end of each range, or none for the newest."""
    if environment.name == ".venv":
        return (ROOT / SOURCES[environment.name]).read_text()
    if environment.name == ".venv-newest":
        return ""
    optional = project()["optional-dependencies"].values()
    wanted = [*project()["dependencies"], *(one for extra in optional for one in extra)]
    lowest = [re.match(r"([\w-]+)>=([\w.]+)", requirement) for requirement in wanted]
    return "".join(f"{found[1]}=={found[2]}\n" for found in lowest if found)


def requirements() -> str:
    """The part of pyproject.toml that decides what is installed; settings of tools follow it."""
    return (ROOT / "pyproject.toml").read_text().partition("\n[tool.ruff")[0]


def project() -> dict[str, Any]:
    import tomllib  # from Python 3.11 on

    return dict(tomllib.loads(requirements())["project"])


def read_record(environment: Path) -> dict[str, Any] | None:
    """None if this set-up has never run here; empty if the record is damaged: it did not finish."""
    try:
        path = environment / RECORD
        return dict(json.loads(path.read_text())) if path.exists() else None
    except (ValueError, TypeError):
        return {}


def is_linux_without_gpu() -> bool:
    driver = Path("/proc/driver/nvidia/version")
    return sys.platform == "linux" and not driver.exists() and not shutil.which("nvidia-smi")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("set-up: stopped; run the same command again to continue")
