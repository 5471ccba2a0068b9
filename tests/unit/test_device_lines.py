"""device_lines.txt beside this file lists every function of the product that does something else
where there is a GPU, or calls a package for GPUs, with the test that runs that part, or why none
can. Here: the list is whole, and the tests that it names exist.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("device_lines.txt")
PRODUCT = ("bosch", "data", "training", "eval", "recipes", "benchmarks", "launch")
# In code, not in docstrings and comments. "cuda" for is_cuda: the product compares device types.
WORDS = re.compile(r"cuda|is_available|flash|liger|nccl|pin_memory", re.IGNORECASE)
NONE = "none: "  # a reason follows


def listed() -> dict[str, str]:
    """By `file function`: a test, as `tests/file.py::name`, or the reason why there is none."""
    lines = [line for line in LIST.read_text().splitlines() if line and line[0] != "#"]
    rows = dict(line.split(" | ") for line in lines)
    assert len(rows) == len(lines), "a place is listed twice"
    return rows


def places(root: Path) -> Iterator[str]:
    """`file function` of every place below root; `file -` for code outside of functions."""
    for part in PRODUCT:
        for path in sorted((root / part).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if name.split("/")[:2] not in (["bosch", other] for other in PRODUCT):  # links
                for function, node in top_functions(ast.parse(path.read_text("utf-8")), ""):
                    if WORDS.search(code_of(node)):
                        yield f"{name} {function}"


def top_functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Functions and methods; what they hold within belongs to them. `-`: statements beside them."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.FunctionDef):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from top_functions(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.Import | ast.ImportFrom):
            yield f"{prefix}-", child


def code_of(node: ast.AST) -> str:
    """The source without comments and docstrings, which are statements of a string alone."""
    for part in ast.walk(node):
        body = getattr(part, "body", None)
        if isinstance(body, list):
            part.body = [x for x in body if not is_text(x)] or [ast.Pass()]  # type: ignore[attr-defined]
    return "" if is_text(node) else ast.unparse(node)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_every_place_is_listed_with_the_test_that_runs_it() -> None:
    rows, found = listed(), set(places(ROOT))
    assert not found - rows.keys(), f"not in {LIST.name}"
    assert not rows.keys() - found, f"in {LIST.name}, but not in the code"
    for place, test in rows.items():
        if not test.startswith(NONE):
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file(), (place, test)
            assert f"def {name}(" in (ROOT / file).read_text("utf-8"), (place, test)
