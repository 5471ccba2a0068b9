"""Whether this code stands in a checkout or was installed, and which commands work there."""

import importlib.metadata
import tomllib
from pathlib import Path


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
