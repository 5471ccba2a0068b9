"""A copy of the package in which tests add and damage files: plug-ins, bugs. Every file is a link
to the real one until it is changed, so tests that run at the same time see nothing of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import bosch

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def example_of_page(file: str) -> str:
    """The program in docs/extending.md whose first line names this file."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    (example,) = [block for block in blocks if block.startswith(f"# {file}\n")]
    return str(example)


class PackageCopy:
    """The package under `root`, for programs that are started in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        _link_files(Path(bosch.__file__).parent, root / "bosch")

    def write(self, path: str, text: str) -> Path:
        """A file of this text; a link in its place is removed first."""
        file = self.root / path
        file.unlink(missing_ok=True)
        file.write_text(text)
        return file

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """python -m COMMAND on the copy, in its root folder."""
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(self.root)} | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *command: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of the same."""
        process = self.start(*command)
        out, errors = process.communicate(timeout=600)
        return process.returncode, out, errors


def _link_files(source: Path, target: Path) -> None:
    """Folders are made, files are linked, compiled ones too: nothing is compiled twice."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_dir():
            _link_files(path, target / path.name)
        else:
            (target / path.name).symlink_to(path)
