"""Calibration examples from questions of one's own: JSON lines with the fields text, question and
answer. The model reads the text, a line break and the question; the answer follows after a blank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bosch.data.sources.files import read_lines
from bosch.data.sources.source import take_field
from bosch.run.errors import MissingFileError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class OwnQuestion:
    """One row, as a context of the calibration set."""

    place: str  # file and line
    prompt: str
    answer: str
    task = "own"

    @property
    def pieces(self) -> list[tuple[str, str]]:
        return [(self.prompt, f" {self.answer}")]

    @property
    def row(self) -> dict[str, object]:
        text = f"{self.prompt} {self.answer}"
        return {"task": self.task, "text": text, "answers": [[self.answer]], "pairs": []}

    def needles(self, tokenizer: "PreTrainedTokenizerBase") -> list[range]:
        """The whole prompt, since nobody says where in it the answer stands."""
        return [range(len(tokenizer(self.prompt)["input_ids"]))]


def read_questions(path: Path) -> list[OwnQuestion]:
    """The rows of a file. UserError with the line of one that cannot be used."""
    if not path.is_file():
        raise MissingFileError(
            f"{path} does not exist; name a file of lines with text, question and answer."
        )
    if not (questions := list(_read(path))):
        raise UserError(f"{path} holds no questions; write one a line, as a JSON object.")
    return questions


def _read(path: Path) -> Iterator[OwnQuestion]:
    for number, row in read_lines(path, skip=0):
        place, fields = f"{path}, line {number}", row or {}
        text, question, answer = (
            str(take_field(fields, name, place, None)).strip()
            for name in ("text", "question", "answer")
        )
        if not answer or not (text or question):
            lacking = "has no answer" if not answer else "has neither text nor question"
            raise UserError(f"{place} {lacking}; fill it in, or leave the line out.")
        yield OwnQuestion(place, f"{text}\n{question}".strip(), answer)
