"""Calibration examples of one's own: JSON lines with the fields text, question and answer, or with
a text alone. The model reads the text, a line break and the question; the answer follows after a
blank. Of a text alone, the last quarter is what the model is to continue with.
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
    answer: str  # with the blank before it
    task = "own"

    @property
    def pieces(self) -> list[tuple[str, str]]:
        return [(self.prompt, self.answer)]

    @property
    def row(self) -> dict[str, object]:
        text, answer = self.prompt + self.answer, self.answer.strip()
        return {"task": self.task, "text": text, "answers": [[answer]], "pairs": []}

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
        if fields.keys() & {"text", "question", "answer"} == {"text"}:
            yield _to_continue(str(take_field(fields, "text", place, None)).strip(), place)
            continue
        text, question, answer = (
            str(take_field(fields, name, place, None)).strip()
            for name in ("text", "question", "answer")
        )
        if not answer or not (text or question):
            lacking = "has no answer" if not answer else "has neither text nor question"
            raise UserError(f"{place} {lacking}; fill it in, or leave the line out.")
        yield OwnQuestion(place, f"{text}\n{question}".strip(), f" {answer}")


def _to_continue(text: str, place: str) -> OwnQuestion:
    """A text cut after about three quarters, before a word where it has blanks."""
    quarter = len(text) * 3 // 4
    if not quarter:
        raise UserError(f"{place} has no text that could be continued; leave the line out.")
    blank = text.find(" ", quarter)
    cut = quarter if blank < 0 else blank
    return OwnQuestion(place, text[:cut], text[cut:])
