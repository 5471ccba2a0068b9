"""`journal.jsonl`: every evaluation of a search, a line each, on the disk before the search goes
on.

The first line says of which search it is. A killed search makes the same calls again and gets the
same answers from its journal, in order; then it computes and writes on. A line that a kill tore is
dropped. With several ranks rank 0 reads and writes, and the others are told.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from bosch.run.errors import UserError
from bosch.run.fingerprint import plain
from bosch.run.group import agree, is_first
from bosch.run.lines import append_line, whole_lines
from bosch.run.plan import describe_changes
from bosch.run.progress import say
from bosch.search.objective import Rows

FILE = "journal.jsonl"
VERSION = 1

Line = dict[str, Any]


class Journal:
    """A search's journal. Without a folder nothing is written, and nothing can be resumed."""

    def __init__(self, folder: Path | None, facts: Mapping[str, Any]) -> None:
        """facts: everything that decides the search's way, and nothing else."""
        self._file: BinaryIO | None = None
        problem, lines = None, []
        if folder is not None and is_first():
            try:
                lines = self._open(folder / FILE, facts)
            except ValueError as error:  # every rank must end, not only this one
                problem = str(error)
        problem, lines = agree((problem, lines))
        if problem:
            raise UserError(problem)
        self._waiting: list[Line] = lines[::-1]  # those not replayed yet, the next one last
        self.strayed: dict[Rows, Line] = {}  # scores of a way that the search has left
        if lines:
            say(f"{len(lines)} evaluations are in the journal already; the search goes on there")

    def replay(self, stage: str, z: Rows, threshold: float | None) -> Line | None:
        """The line of this call, if an earlier attempt has made it."""
        if not self._waiting:
            return None
        line = self._waiting[-1]
        if (line["stage"], rows_of(line["z"]), line["threshold"]) == (stage, z, threshold):
            return self._waiting.pop()
        # An optimizer that hung was given up by the clock, or the memo is on or off since then.
        # What is known of masks still holds.
        say(
            f"evaluation {line['number']} is another one than in the journal; the search takes its "
            "new way, with the scores that are known"
        )
        self.strayed = {rows_of(line["z"]): line for line in self._waiting if line["exact"]}
        self._waiting = []
        return None

    def append(self, line: Line) -> None:
        if self._file is not None:
            append_line(self._file, line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self, path: Path, facts: Mapping[str, Any]) -> list[Line]:
        """Its lines, with the file open behind the last whole one."""
        header = {"version": VERSION, "settings": plain(facts), "inputs": {}}
        lines: list[Line] = []
        for number, text in enumerate(whole_lines(path), start=1):
            try:
                lines.append(json.loads(text))
                lines[-1]["settings" if number == 1 else "z"]
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{path} is damaged: its line {number} is no evaluation. Move it away to "
                    "search anew."
                ) from None
        if lines and (changed := describe_changes(lines[0], header)):
            raise UserError(
                f"{path} is of a search with other settings ({changed}); move it away "
                "to search anew, or go back to the old setting."
            )
        self._file = path.open("ab")
        if not lines:
            self.append(header)
        return lines[1:]


def texts_of(z: Rows) -> list[str]:
    """A mask as a line has it: a string of 0 and 1 a layer."""
    return ["".join(map(str, row)) for row in z]


def rows_of(texts: list[str]) -> Rows:
    return tuple(tuple(map(int, text)) for text in texts)
