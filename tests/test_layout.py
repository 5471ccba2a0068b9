"""The layout of the repository: which package may import which, that no modules import each other
in a circle.

`recipes -> {training, eval} -> data -> bosch`; training and eval do not know each other. All are
imported as parts of the one package that is installed: `bosch/data` is a link to `data`, and a file
in it is `bosch.data.pack`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "bosch": set(),
    "data": {"bosch"},
    "training": {"data", "bosch"},
    "eval": {"data", "bosch"},
    "recipes": {"training", "eval", "data", "bosch"},
    "benchmarks": {"recipes", "training", "eval", "data", "bosch"},
}
SCRIPTS = {"tests", "launch"}  # folders of Python files that no package may import
PARTS = MAY_IMPORT.keys() - {"bosch", "benchmarks"}  # imported as bosch.data and so on
# Functions whose first argument, when it is written out, names a module or package to load.
LOADERS = {"import_module", "__import__", "find_spec", "load_plugin", "list_plugins"}


def test_imports_point_one_way() -> None:
    # "": a relative import, which does not say of what. `bare`: hides a module of the user's, and
    # is not there when the package is installed.
    ours = MAY_IMPORT.keys() | SCRIPTS | {"", "bare"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {package} imports {module}"
        for package, allowed in MAY_IMPORT.items()
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, module, _ in imported_modules(path)
        if re.split(r"[. ]", module)[0] in ours - allowed - {package}
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    imports = {
        name.removesuffix(".__init__"): {
            f"{module}.{part}" if f"{module}.{part}" in modules else module
            for _, module, parts in imported_modules(path)
            for part in parts or [""]
        }
        for name, path in modules.items()
    }

    def reachable(name: str) -> set[str]:
        found, left = set[str](), [name]
        while left:
            new = imports.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    reached = {name: reachable(name) for name in imports}
    circles = {
        frozenset(other for other in reached[name] if name in reached.get(other, ()))
        for name in imports
    }
    assert [sorted(circle) for circle in circles if len(circle) > 1] == []


def imported_modules(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Line and name of each module a file imports, anywhere in it, and what it takes of it."""
    for line, module, names in import_statements(path):
        if module == "bosch":
            yield from ((line, n if n in PARTS else module, [n]) for n in names or [""])
        elif module.removeprefix("bosch.").split(".")[0] in PARTS:
            is_bare = not module.startswith("bosch.")
            yield line, f"bare {module}" if is_bare else module.removeprefix("bosch."), names
        else:
            yield line, module, names


def import_statements(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in LOADERS and node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value), []
