"""The folders of checkpoints by name. Whatever does not count has a dot in front: half-written,
damaged, on its way out.
"""

import shutil
from pathlib import Path

from bosch.run.manifest import sync_directory


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """By step. Whether they are whole is not asked. A copy under another name is the user's."""
    steps = ((path.name.removeprefix("step-"), path) for path in folder.glob("step-*"))
    return {int(number): path for number, path in steps if number.isdecimal()}


def set_aside(path: Path) -> Path:
    """Where a damaged checkpoint is kept from now on."""
    number, aside = 1, path.with_name(f".{path.name}.bad")
    while aside.exists():
        number += 1
        aside = path.with_name(f".{path.name}-{number}.bad")
    path.rename(aside)
    sync_directory(path.parent)
    return aside


def remove(path: Path) -> None:
    """Renamed first: killed in between, half a checkpoint under its name would look damaged."""
    hidden = path.with_name(f".{path.name}.removed")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Of saves and removals that were killed."""
    for kind in ("tmp", "removed"):
        for path in folder.glob(f".step-*.{kind}"):
            shutil.rmtree(path, ignore_errors=True)
