"""What a folder from elsewhere may do: name files and hold links. Nothing that it says leads out of
it, neither for reading nor for writing.
"""

import os
from pathlib import Path, PurePosixPath
from typing import Any

from bosch.run.errors import UserError

CHAT_TEMPLATES = "additional_chat_templates"  # the one folder in a model's folder that is copied


def path_inside(folder: Path, name: object, source: Path, flat: bool = False) -> Path:
    """`folder / name`, of a name that the file `source` holds. flat: in the folder itself, not in
    one of its folders."""
    path = PurePosixPath(name if isinstance(name, str) else "")
    is_inside = path.parts and not path.is_absolute() and ".." not in path.parts
    if not is_inside or "\0" in str(path) or (flat and path.parts != (name,)):
        raise UserError(
            f"{source} names the file {str(name)[:200]!r}, which is not the name of a file in "
            f"{folder}. Fetch or make the folder again."
        )
    return folder / path


def refuse_foreign_links(folder: Path) -> None:
    """Refuse a model folder with a link to a file elsewhere: what is made of the folder, and
    perhaps published, would hold that file. Snapshots in the hub's cache are links to its `blobs`.
    """
    root = folder.resolve()
    homes = [root]
    for inner in (root, *root.parents):
        snapshots = inner.parent
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
            homes.append(snapshots.parent / "blobs")
    files = [path for path in folder.glob("[!.]*") if not path.is_dir()]
    for path in sorted([*files, *folder.glob(f"{CHAT_TEMPLATES}/**/*")]):
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(home) for home in homes):
            raise UserError(
                f"{path} is a link to {target}, outside of the model's folder. If that file "
                "belongs to the model, put a copy of it in the place of the link."
            )


def open_own_file(path: Path, mode: str) -> Any:
    """Like open(), but a link is refused: what it leads to is not ours to write. So is what is no
    file: a pipe would wait for a reader."""

    def follow_no_link(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    refuse_link(path)
    refuse_no_file(path)
    return open(path, mode, opener=follow_no_link, encoding=None if "b" in mode else "utf-8")


def refuse_no_file(path: Path) -> None:
    """Refuse a folder, a pipe or a device in the place of a file that is ours to write."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or device"
        raise UserError(f"{path} is {kind}, where a file is to be written. Move it away.")


def refuse_link(path: Path) -> None:
    """Refuse a link in the place of a file or folder that is only ours to write."""
    if path.is_symlink():
        raise UserError(f"{path} is a link, so writing would change what it leads to. Remove it.")
