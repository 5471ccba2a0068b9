"""A folder of plug-ins is its own registry: `bosch/methods/fisher.py` is the method `fisher`. A
file whose name begins with `_` is a part of the folder, not a plug-in. What every plug-in must
define is named in `NEEDS` in the folder's `__init__.py`.

A broken file is one UserError that names it when that plug-in is loaded; listing the folder and
loading others goes on.
"""

import ast
import difflib
import importlib
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from bosch.run.errors import UserError


class BrokenPluginError(UserError):
    """A plug-in's file cannot be imported or lacks a name; the message names the file."""


def list_plugins(package: str) -> tuple[str, ...]:
    """Names of the plug-ins in a package (`bosch.methods`), sorted. None of them is imported."""
    paths = sorted(_folder(package).glob("*.py"))
    return tuple(path.stem for path in paths if path.name[0] not in "._")


def load_plugin(package: str, name: str) -> ModuleType:
    """The module behind a plug-in's name. Its UserError offers the nearest name and all others."""
    names = list_plugins(package)
    # Before the import, which would also load parts of the folder (`_settings`), and whose error
    # knows no other names.
    if name not in names:
        kind = package.rsplit(".", 1)[-1]
        raise UserError(f"{name!r} is not one of the {kind}: {suggest(name, names)}")
    path = _folder(package) / f"{name}.py"
    try:
        module = importlib.import_module(f"{package}.{name}")
    except Exception as error:  # whatever the file does when it is imported
        raise BrokenPluginError(_describe_failed_import(path, error)) from error
    needs = getattr(importlib.import_module(package), "NEEDS", ())
    for needed in needs:
        if not hasattr(module, needed):
            each = f"a plug-in of this folder defines {', '.join(needs)}."
            raise BrokenPluginError(f"{path} does not define {needed}; {each}")
    return module


def describe_plugin(package: str, name: str) -> str:
    """First sentence of a plug-in's docstring, or what is wrong with it. It is not imported."""
    # From its text: a list of all methods must not wait for torch, nor end at one broken file.
    try:
        tree = ast.parse((_folder(package) / f"{name}.py").read_bytes())
    except (SyntaxError, ValueError, OSError) as error:  # ValueError: a null byte
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


def _folder(package: str) -> Path:
    return Path(importlib.import_module(package).__path__[0])
