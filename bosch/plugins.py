"""A folder of plug-ins is its own registry: `bosch/methods/fisher.py` is the method `fisher`. A
file whose name begins with `_` is a part of the folder, not a plug-in. What every plug-in must
define is named in `NEEDS` in the folder's `__init__.py`.

Plug-ins of one's own may stand in folders of one's own (`--plugins DIR`, `BOSCH_PLUGINS`), in
subfolders named as in KINDS: `DIR/methods/mine.py` is the method `mine`. Or an installed package
names them as entry points: `mine = "my_package.mine"` in the group `bosch.methods`.

A broken file is one UserError that names it when that plug-in is loaded; listing the folder and
loading others goes on.
"""

import ast
import difflib
import functools
import importlib
import os
import traceback
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from bosch.run.errors import MissingFileError, UserError
from bosch.run.fingerprint import fingerprint, hash_file

KINDS = {  # subfolder of a folder of one's own, and name of a group of entry points -> package
    "methods": "bosch.methods",
    "suites": "bosch.eval.suites",
    "backends": "bosch.attention.backends",
    "families": "bosch.families",
    "optimizers": "bosch.search.optimizers",
}
KIND_OF = {package: kind for kind, package in KINDS.items()}
# The folders, separated as in PATH: the processes that this one starts inherit it.
FOLDERS = "BOSCH_PLUGINS"


class BrokenPluginError(UserError):
    """A plug-in's file cannot be imported or lacks a name; the message names the file."""


def add_folders(folders: Iterable[str | Path]) -> None:
    """Take plug-ins from these folders too, here and in the processes that this one starts. Before
    torch is imported, if there are backends or families among them."""
    added = [os.path.abspath(Path(folder).expanduser()) for folder in folders]
    together = os.pathsep.join(dict.fromkeys([*own_folders(), *added]))
    _check_folders(together)
    if together:
        os.environ[FOLDERS] = together


def own_folders() -> list[str]:
    return [os.path.abspath(each) for each in os.environ.get(FOLDERS, "").split(os.pathsep) if each]


@functools.cache
def _check_folders(together: str) -> None:
    for folder in filter(None, together.split(os.pathsep)):
        if not os.path.isdir(folder):
            problem = "is not a folder" if os.path.exists(folder) else "does not exist"
            raise MissingFileError(f"--plugins {folder} {problem}; name a folder of plug-ins.")
        if not any(os.path.isdir(os.path.join(folder, kind)) for kind in KINDS):
            raise UserError(
                f"--plugins {folder} has none of the subfolders {', '.join(KINDS)}: a method of "
                f"yours is the file {os.path.join(folder, 'methods', 'NAME.py')}."
            )


def list_plugins(package: str) -> tuple[str, ...]:
    """Names of the plug-ins of a package (`bosch.methods`), sorted. None of them is imported."""
    return tuple(sorted(_find(package)))


def load_plugin(package: str, name: str) -> ModuleType:
    """The module behind a plug-in's name. Its UserError offers the nearest name and all others."""
    found = _find(package)
    # Before the import, which would also load parts of the folder (`_settings`), and whose error
    # knows no other names.
    if name not in found:
        kind = package.rsplit(".", 1)[-1]
        raise UserError(f"{name!r} is not one of the {kind}: {suggest(name, tuple(found))}")
    place = found[name]
    try:
        module = importlib.import_module(
            f"{package}.{name}" if isinstance(place, Path) else place.module
        )
    except Exception as error:  # whatever the file does when it is imported
        raise BrokenPluginError(_describe_failed_import(_file_of(place), error)) from error
    needs = getattr(importlib.import_module(package), "NEEDS", ())
    for needed in needs:
        if not hasattr(module, needed):
            each = f"a plug-in of this folder defines {', '.join(needs)}."
            raise BrokenPluginError(f"{module.__file__} does not define {needed}; {each}")
    return module


def own_files(*named: tuple[str, str]) -> dict[str, str]:
    """What decides results of the plug-ins (package, name) that are not this package's: for each,
    as `methods/mine.py`, a checksum of its file and of the parts beside it (`_parts.py`)."""
    checksums = {}
    for package, name in named:
        place = _find(package).get(name)
        if place is None or (isinstance(place, Path) and place.parent == _folders(package)[0]):
            continue
        file = _file_of(place)
        beside = sorted(file.parent.glob("_*.py")) if isinstance(place, Path) else []
        content = {path.name: hash_file(path) for path in [file, *beside]}
        checksums[f"{KIND_OF[package]}/{name}.py"] = fingerprint(content)
    return checksums


def own_backend_files(attention: str) -> dict[str, str]:
    """`own_files` of the attention backend of this name; `auto` may choose any."""
    package = KINDS["backends"]
    names = list_plugins(package) if attention == "auto" else [attention]
    return own_files(*((package, name) for name in names))


def describe_plugin(package: str, name: str) -> str:
    """First sentence of a plug-in's docstring, or what is wrong with it. It is not imported."""
    # From its text: a list of all methods must not wait for torch, nor end at one broken file.
    try:
        tree = ast.parse(_file_of(_find(package)[name]).read_bytes())
    except (SyntaxError, ValueError, OSError, ImportError) as error:  # ValueError: a null byte
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        return f"(broken: {line}{_reason(error)})"
    return first_sentence(ast.get_docstring(tree) or "")


def first_sentence(docstring: str) -> str:
    """A docstring up to its first full stop or empty line, on one line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return sentence + stop.strip()


def suggest(name: str, names: Sequence[str]) -> str:
    """The part of an error that helps after an unknown name: the nearest one, then all of them."""
    if not names:
        return "there are none."
    lower = {each.lower(): each for each in names}
    nearest = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    there_are = f"did you mean {lower[nearest[0]]!r}? There are" if nearest else "there are"
    return f"{there_are} {', '.join(names)}."


def _describe_failed_import(path: Path, error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}, line {error.lineno}: {_reason(error)}."
    # The last line in the plug-in itself: the frames below are of importlib and of libraries.
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    place = f"{path}, line {lines[-1]}" if lines else str(path)
    # A module of ours that is missing is a wrong import in the file, and nothing to install.
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if missing.partition(".")[0] not in ("", __name__.partition(".")[0]):
        return f"{place}: the package {missing!r} is not installed; install it or remove the file."
    if isinstance(error, UserError):
        return f"{place}: {error}"
    return f"{place}: {type(error).__name__}: {_reason(error)} (--debug shows the traceback)."


def _reason(error: Exception) -> str:
    text = str(getattr(error, "msg", "") or error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _find(package: str) -> dict[str, Path | EntryPoint]:
    """Where each plug-in is: its file, or the module that an installed package names."""
    found: dict[str, Path | EntryPoint] = {}
    for folder in _folders(package):
        for path in sorted(folder.glob("*.py")):
            # Parts too: `_parts` can be imported of one folder only.
            if path.name[0] != "." and path.stem != "__init__":
                if path.stem in found:
                    already = f"{found[path.stem]} has this name already"
                    raise UserError(f"{path}: {already}; give your file another name.")
                found[path.stem] = path
    for point in _entry_points(KIND_OF[package]) if package in KIND_OF else ():
        if point.name in found:
            already = f"{found[point.name]} has this name already"
            raise UserError(f"{point.group}: {point.name} = {point.value}: {already}.")
        found[point.name] = point
    return {name: place for name, place in found.items() if name[0] != "_"}


@functools.cache
def _entry_points(kind: str) -> Sequence[EntryPoint]:
    return tuple(entry_points(group=f"bosch.{kind}"))


def _folders(package: str) -> list[Path]:
    """The package's own folder first."""
    places = importlib.import_module(package).__path__
    _check_folders(os.pathsep.join(own_folders()))
    for folder in own_folders() if package in KIND_OF else ():
        own = os.path.join(folder, KIND_OF[package])
        # Python imports `bosch.methods.mine` from there too, and parts beside it.
        if os.path.isdir(own) and own not in places:
            places.append(own)
    return [Path(place) for place in places]


def _file_of(place: Path | EntryPoint) -> Path:
    if isinstance(place, Path):
        return place
    spec = find_spec(place.module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module {place.module}", name=place.module)
    return Path(spec.origin)
