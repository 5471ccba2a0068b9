"""Writes wheels of a few bytes, and is the build backend of the checkouts in test_setup.py.

A checkout with a pipe named `hold` stops in the middle of its installation: it opens the pipe,
which tells the test, and then waits for a line that the test never writes.
"""

import zipfile
from pathlib import Path
from typing import Any


def write_wheel(folder: Path, name: str, version: str, requires: list[str] | None = None) -> str:
    """A wheel whose only module is empty and bears its name; returns the file's name."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Provides-Extra: {extra}" for extra in ("dev", "kernels-build")]
    metadata += [f"Requires-Dist: {line}" for line in requires or []]
    files = {
        f"{module}.py": "",
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    wheel = f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def build_editable(folder: str, *_: Any) -> str:
    """What pip calls for `pip install --editable`."""
    if Path("hold").exists():
        with open("hold", "w") as begun, open("never") as never:
            begun.write("begun")
            begun.flush()
            never.read()
    requires = ["torch", "transformers", "accelerate", 'toy-tools; extra == "kernels-build"']
    return write_wheel(Path(folder), "toy", "1", requires)
