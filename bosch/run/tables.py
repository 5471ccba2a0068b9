"""Tables on the terminal."""

import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bosch.run.plain_text import visible

PLAIN_COLUMNS = 120  # width of a table that does not go to a terminal


def show_table(title: str, header: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """Print a table with right-aligned columns. None is shown as a dash."""
    table = Table(title=cell_text(title, "bold"), title_justify="left", show_edge=False)
    for name in header:
        table.add_column(cell_text(name), justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*(cell_text("–" if cell is None else cell) for cell in line))
    Console(width=None if sys.stdout.isatty() else PLAIN_COLUMNS).print(table, end="\n\n")


def cell_text(content: object, style: str = "") -> Text:
    """As it is: rich reads brackets in a str as markup."""
    return Text(visible(content), style)


def show_rows(title: str, rows: Iterable[Mapping[str, object]], columns: Mapping[str, str]) -> None:
    """Print rows as a table. Columns: heading -> field of a row, with an optional format:
    `seconds:.1f`."""
    lines = []
    for row in rows:
        cells = []
        for column in columns.values():
            name, _, form = column.partition(":")
            cells.append(None if row[name] is None else format(row[name], form))
        lines.append(cells)
    show_table(title, list(columns), lines)
