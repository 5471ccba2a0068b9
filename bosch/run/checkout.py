"""Which code this is: a checkout or an installed package, its version and commit, and with which
packages a result was made."""

import contextlib
import functools
import importlib.metadata
import platform
import subprocess
import tomllib
from pathlib import Path

# Packages whose versions are recorded.
PACKAGES = "torch transformers accelerate datasets safetensors numpy PyNomadBBO liger-kernel"
ROOT = Path(__file__).resolve().parents[2]  # the repository's folder, in a checkout


def is_checkout() -> bool:
    return (ROOT / "launch" / "setup_environment.py").is_file()


def read_version() -> str:
    """Of this code. A checkout may not be installed, or was installed at another version."""
    if not is_checkout():
        return importlib.metadata.version("bosch-hybrid")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return str(project["version"])


def how_to_install(packages: str, extra: str) -> str:
    """The command that installs optional packages. The project is on no index, so its extras can be
    named in a checkout only."""
    own = f"python3 launch/setup_environment.py {extra}"
    return own if is_checkout() else f"pip install {packages}"


@functools.cache
def provenance() -> dict[str, object]:
    """For a manifest: package versions and the commit, with -dirty after uncommitted changes."""
    versions = {"python": platform.python_version(), "bosch-hybrid": read_version()}
    for package in PACKAGES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    commit = None
    # Not of an installed package: git would find the repository around it, which is another's.
    if (ROOT / ".git").exists():
        describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            commit = subprocess.check_output(describe, cwd=ROOT, text=True, stderr=subprocess.PIPE)
    return {"packages": versions, "commit": commit and commit.strip()}
