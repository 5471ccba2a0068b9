"""The calibration set as the search and the static methods read it: token ids, and where in them
the answers and the needles stand.

data/calibration.py builds the set; `bosch` imports nothing of `data`, so the types that both speak
are here, with the file that passes between them. `calibration.safetensors` holds `ids` (all texts,
one behind another), `ends` (where each text ends in them) and `questions` (Q, 5): number of the
text, start and stop of the answer, start and stop of the needle, counted in that text. Its metadata
field `tasks` is a JSON list with the task of each question.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bosch.run.errors import MissingFileError, UserError
from bosch.run.manifest import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

FILE = "calibration.safetensors"


@dataclass(frozen=True)
class Question:
    """One example of the score S: it counts when every answer token is the arg-max."""

    answer: range  # positions of the answer's tokens
    needle: range  # positions of the sentence that holds the answer
    task: str

    @property
    def predicting(self) -> range:
        """Positions whose next token is an answer token."""
        return range(self.answer.start - 1, self.answer.stop - 1)


@dataclass(frozen=True)
class Haystack:
    """A text with its needles, questions and their answers: one prefill judges them all."""

    ids_T: "Tensor"  # int64
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Calibration:
    """All haystacks of a calibration set."""

    haystacks: Sequence[Haystack]

    @property
    def num_questions(self) -> int:
        return sum(len(haystack.questions) for haystack in self.haystacks)

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(len(haystack.ids_T) for haystack in self.haystacks)


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Write the set's file into a folder. Same set, same bytes."""
    import torch  # here, for --help and wrong command lines load no torch
    from safetensors.torch import save

    rows = [
        (number, q.answer.start, q.answer.stop, q.needle.start, q.needle.stop)
        for number, haystack in enumerate(calibration.haystacks)
        for q in haystack.questions
    ]
    lengths = torch.tensor([len(haystack.ids_T) for haystack in calibration.haystacks])
    tensors = {
        "ids": torch.cat([haystack.ids_T for haystack in calibration.haystacks]).long(),
        "ends": lengths.cumsum(0),
        "questions": torch.tensor(rows, dtype=torch.long).reshape(-1, 5),
    }
    tasks = [q.task for haystack in calibration.haystacks for q in haystack.questions]
    write_atomically(folder / FILE, save(tensors, {"tasks": json.dumps(tasks)}))


def read_calibration(folder: Path) -> Calibration:
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.is_file():
        raise MissingFileError(
            f"{path} does not exist; pass the folder of a calibration set (recipes/calibrate.py)."
        )
    try:
        with safe_open(path, "pt") as file:
            ids, ends, rows = (file.get_tensor(name) for name in ("ids", "ends", "questions"))
            tasks = json.loads((file.metadata() or {})["tasks"])
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a calibration set: {error}.") from error
    questions: list[list[Question]] = [[] for _ in ends]
    for (number, *bounds), task in zip(rows.tolist(), tasks, strict=True):
        answer, needle = range(bounds[0], bounds[1]), range(bounds[2], bounds[3])
        questions[number].append(Question(answer, needle, task))
    texts = zip(ids.tensor_split(ends[:-1]), questions, strict=True)
    return Calibration([Haystack(text, tuple(asked)) for text, asked in texts])
