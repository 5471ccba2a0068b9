"""Names and notes that come from files, for the places where they are shown. There a line break, a
terminal's control code, Markdown or YAML in them would do something."""

import html
import json
import re
from collections.abc import Sequence

# Characters that begin something in Markdown: code, tables, emphasis, links; at the start of a
# line, lists and headings. `begin_middle_end` and `62% [41%, 80%]` stay as they are.
MARKS = re.compile(r"[\\`|]|\*(?=\S)|(?<![^\W_])_(?=\S)|\](?=[(\[:])|^[#+=-](?=[#\s]|$)|^\[")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and line breaks
PLAIN_YAML = re.compile(r"[A-Za-z][\w./-]*(?::[\w./-]+)*")  # needs no quotes


def visible(text: object) -> str:
    """The text on one line, with its control characters written out (`\\x1b`)."""
    line = str(text)
    if line.isprintable():  # pictures in a page are long
        return line
    return "".join(
        c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode()
        for c in line
    )


def markdown(text: object) -> str:
    """Markdown or HTML that shows the text as it is."""
    return html.escape(MARKS.sub(r"\\\g<0>", visible(text)), quote=False)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [[markdown(cell) for cell in line] for line in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return [f"| {' | '.join(line)} |" for line in lines]


def yaml_text(text: object) -> str:
    """A YAML scalar that is this text."""
    line = visible(text)
    return line if PLAIN_YAML.fullmatch(line) else json.dumps(line, ensure_ascii=False)


def picture_label(text: object) -> str:
    """For matplotlib, which reads dollars as formulas and leaves names that begin with an
    underscore out of legends."""
    line = visible(text)
    return ("\N{ZERO WIDTH SPACE}" if line.startswith("_") else "") + line.replace("$", r"\$")
