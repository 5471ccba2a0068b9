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


def find_checkout() -> Path | None:
    """The repository's folder; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "launch" / "setup_environment.py").is_file() else None


def read_version() -> str:
    """Of this code. A checkout may not be installed, or was installed at another version."""
    if (root := find_checkout()) is None:
        return importlib.metadata.version("bosch-hybrid")
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return str(project["version"])


def how_to_install(packages: str, extra: str) -> str:
    """The command that installs optional packages. The project is on no index, so its extras can be
    named in a checkout only."""
    if find_checkout() is None:
        return f"pip install {packages}"
    return f"python3 launch/setup_environment.py {extra}"


@functools.cache
def provenance() -> dict[str, object]:
    """What produced a result, for its manifest: package versions and the commit of this code."""
    versions = {"python": platform.python_version(), "bosch-hybrid": read_version()}
    for package in PACKAGES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"packages": versions, "commit": _commit()}


def _commit() -> str | None:
    """The commit of this code, with -dirty after uncommitted changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
