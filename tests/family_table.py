"""Runs the quick pass of every family and writes what was tested as a table into docs/own-model.md.

python -m tests.family_table
"""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from bosch.plugins import list_plugins

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "own-model.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
COLUMNS = {  # of the table: tests of tests/contracts/test_every_family.py
    "search and hybrid = plain loop": "test_search_and_hybrid_are_the_plain_loop",
    "caches": "test_caches_give_the_tokens_of_no_cache",
    "save, load, train, back": "test_a_saved_hybrid_loads_trains_and_goes_back",
    "probabilities of a search": "test_a_search_reads_the_models_own_probabilities",
}


class Outcomes:
    """A plug-in of pytest that keeps what became of each test."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.of[report.nodeid.rpartition("::")[2]] = report.outcome


def families() -> dict[str, str]:
    """The families, and what is special about each, from the first sentence of its file."""
    found = {}
    for name in list_plugins("bosch.families"):
        text = (ROOT / "bosch" / "families" / f"{name}.py").read_text("utf-8")
        title, _, special = (ast.get_docstring(ast.parse(text)) or "").partition(" as a hybrid")
        found[name] = title.partition(" as hybrids")[0], special.strip(" .:\n")
    return {name: "; ".join(filter(None, parts)) for name, parts in found.items()}


def table(outcomes: dict[str, str]) -> str:
    rows = [f"| `model_type` | models | {' | '.join(COLUMNS)} |", f"|{'---|' * (len(COLUMNS) + 2)}"]
    known = families()
    cases = {key.partition("[")[2].removesuffix("]") for key in outcomes}
    for name in sorted(known | dict.fromkeys(cases)):
        special = known.get(name, "some layers have windows of their own")
        cells = [outcomes.get(f"{test}[{name}]", "not run") for test in COLUMNS.values()]
        rows.append(f"| {name} | {special} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    outcomes = Outcomes()
    tests = str(ROOT / "tests" / "contracts" / "test_every_family.py")
    options = ["-q", "-p", "no:cacheprovider", "-k", "not docs"]
    code = pytest.main([*options, tests], plugins=[outcomes])
    page = PAGE.read_text("utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(head + BEGIN + table(outcomes.of) + END + tail, "utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
