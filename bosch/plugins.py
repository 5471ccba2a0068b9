"""A folder of plug-ins is its own registry: `bosch/methods/fisher.py` is the method `fisher`. There
is no list to edit.

The folders are bosch/methods, bosch/backends, bosch/families and eval/suites. A file whose name
begins with `_` is a part of the folder, not a plug-in.
"""

import ast
import difflib
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from bosch.run.errors import UserError


def list_plugins(package: str) -> tuple[str, ...]:
    """Names of the plug-ins in a package (`bosch.methods`), sorted. None of them is imported."""
    paths = sorted(_folder(package).glob("*.py"))
    return tuple(path.stem for path in paths if not path.name.startswith("_"))


def load_plugin(package: str, name: str) -> ModuleType:
    """The module behind a plug-in's name. Its UserError offers the nearest name and all others."""
    names = list_plugins(package)
    if name not in names:
        kind = package.rsplit(".", 1)[-1]
        raise UserError(f"{name!r} is not one of the {kind}: {suggest(name, names)}")
    return importlib.import_module(f"{package}.{name}")


def describe_plugin(package: str, name: str) -> str:
    """First sentence of a plug-in's docstring, for --help, read without importing the plug-in."""
    if name not in list_plugins(package):
        load_plugin(package, name)  # says what there is
    text = (_folder(package) / f"{name}.py").read_text("utf-8")
    return first_sentence(ast.get_docstring(ast.parse(text)) or "")


def first_sentence(docstring: str) -> str:
    """A docstring up to its first full stop or empty line, on one line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return sentence + stop.strip()


def suggest(name: str, names: Sequence[str]) -> str:
    """The part of an error that helps after an unknown name: the nearest one, then all of them."""
    if not names:
        return "there are none."
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    there_are = f"did you mean {nearest[0]!r}? There are" if nearest else "there are"
    return f"{there_are} {', '.join(names)}."


def _folder(package: str) -> Path:
    return Path(importlib.import_module(package).__path__[0])
