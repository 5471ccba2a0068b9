"""`journal.jsonl`: every evaluation of a search, one line each, on disk before the search
continues.

The first line identifies the search. After a kill, the search makes the same calls again, gets the
same answers from its journal in the same order, and then continues to compute and write. A line cut
off by a kill is dropped. With several ranks, rank 0 reads and writes for all.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from bosch.run.errors import UserError
from bosch.run.files import append_line, drop_torn_line, open_own_file, read_lines
from bosch.run.fingerprint import plain
from bosch.run.group import Group
from bosch.run.progress import say
from bosch.run.stage import describe_changes
from bosch.search.objective import Means, Z

FILE = "journal.jsonl"
VERSION = 2

Line = dict[str, Any]


class Journal:
    """The journal of a search. Without a folder nothing is written, and nothing can be resumed."""

    def __init__(self, folder: Path | None, facts: Mapping[str, object]) -> None:
        """facts: everything that determines the course of the search, and nothing else."""
        self._file: BinaryIO | None = None
        lines: list[Line] = []
        if folder is not None:  # an error of rank 0 must end every rank
            lines = Group.current().from_rank_0(lambda: self._open(folder / FILE, facts))
        self._waiting = lines[::-1]  # lines not replayed yet, the next one last
        # Outcomes by text, of lines that no longer match the search.
        self.strayed: dict[Z, dict[int, Means]] = {}
        if lines:
            say(f"the journal has {len(lines)} evaluations; the search resumes after them")

    def replay(self, stage: str, z: Z, threshold: float | None) -> Line | None:
        """The line of this call, if an earlier attempt wrote it."""
        if not self._waiting:
            return None
        line = self._waiting[-1]
        if (line["stage"], z_from_texts(line["z"]), line["threshold"]) == (stage, z, threshold):
            return self._waiting.pop()
        # A hung optimizer was stopped by the clock, or the memo has been switched on or off. The
        # scores of masks are still valid.
        say(
            f"evaluation {line['number']} differs from the journal; the search continues on its "
            "new course and reuses the known scores"
        )
        exact = (line for line in self._waiting if line["exact"])
        self.strayed = {z_from_texts(line["z"]): texts_of(line) for line in exact}
        self._waiting = []
        return None

    def append(self, line: Line) -> None:
        if self._file is not None:
            append_line(self._file, line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self, path: Path, facts: Mapping[str, object]) -> list[Line]:
        """Read the lines, and open the file for appending after the last complete one."""
        header = {"version": VERSION, "settings": plain(facts), "inputs": {}}
        drop_torn_line(path)
        lines: list[Line] = []
        for number, content in read_lines(path):
            # A search that strayed from its journal counts again from an earlier number.
            most = 1 if number <= 2 else lines[-1]["number"] + 1
            if content is None or not (
                content.keys() == header.keys()
                if number == 1
                else 1 <= content.get("number", 0) <= most
            ):
                raise UserError(
                    f"{path} is damaged: line {number} is not the evaluation that belongs there. "
                    "Move the file away to start the search again."
                )
            if number == 1 and (changed := describe_changes(content, header)):
                raise UserError(
                    f"{path} belongs to a search with other settings ({changed}); move it away to "
                    "start the search again, or restore the old setting."
                )
            lines.append(content)
        self._file = open_own_file(path, "ab")
        if not lines:
            self.append(header)
        return lines[1:]


def z_to_texts(z: Z) -> list[str]:
    """A mask as it is written: one string of 0 and 1 per layer."""
    return ["".join(map(str, row)) for row in z]


def z_from_texts(texts: list[str]) -> Z:
    return tuple(tuple(map(int, text)) for text in texts)


def texts_of(line: Line) -> dict[int, Means]:
    """The outcomes of an evaluation by text, in the order in which they were read."""
    return {int(text): Means(*means) for text, means in line["texts"].items()}
