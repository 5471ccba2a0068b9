"""The calibration set as the search and the static methods read it. data/calibration.py builds it.

`calibration.safetensors` holds `ids` (all haystacks, concatenated), `ends` (where each ends) and
`questions` (Q, 5): index of the haystack, start and stop of the answer, start and stop of the
needle, as positions in it. Where there are texts of random tokens, `counts_as` has for each
haystack as how many questions it counts, 0 for all others. Its metadata field `tasks` is a JSON
list with each question's task.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

FILE = "calibration.safetensors"


@dataclass(frozen=True)
class Question:
    """One example of the score S: correct if every answer token is the arg-max."""

    answer: range  # positions of the answer's tokens
    needle: range  # positions of the sentence that holds the answer
    task: str

    @property
    def predicting(self) -> range:
        """The rows that predict the answer: each predicts the token after it."""
        return range(self.answer.start - 1, self.answer.stop - 1)


@dataclass(frozen=True)
class Haystack:
    """A text with its needles, questions and answers: one prefill scores all of them."""

    ids_T: "Tensor"  # int64
    questions: tuple[Question, ...]
    # Of a text of random tokens (bosch/random_texts.py), each of whose later tokens is a question:
    # as how many questions they count together. 0: a text with questions, each of which counts.
    counts_as: int = 0

    @property
    def is_random(self) -> bool:
        return self.counts_as > 0

    @property
    def weight(self) -> int:
        return self.counts_as or len(self.questions)


@dataclass(frozen=True)
class Calibration:
    haystacks: Sequence[Haystack]

    @property
    def texts(self) -> "Calibration":
        """Without random ones, of which only a search asks."""
        return Calibration([haystack for haystack in self.haystacks if not haystack.is_random])

    @property
    def num_questions(self) -> int:
        return sum(len(haystack.questions) for haystack in self.haystacks)

    @property
    def longest(self) -> int:
        return max((len(haystack.ids_T) for haystack in self.haystacks), default=0)


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Write the set's file into a folder. Same set, same bytes."""
    import torch  # here: --help and wrong command lines load no torch
    from safetensors.torch import save

    # One row of all tokens and where each text ends, since texts differ in length.
    texts = [haystack.ids_T for haystack in calibration.haystacks]
    asked = [(n, q) for n, h in enumerate(calibration.haystacks) for q in h.questions]
    places = [(n, q.answer.start, q.answer.stop, q.needle.start, q.needle.stop) for n, q in asked]
    tensors = {
        "ids": torch.cat(texts).long(),
        "ends": torch.tensor([len(ids_T) for ids_T in texts]).cumsum(0),
        "questions": torch.tensor(places, dtype=torch.long).reshape(-1, 5),
    }
    if any(haystack.is_random for haystack in calibration.haystacks):  # else as in earlier versions
        tensors["counts_as"] = torch.tensor([each.counts_as for each in calibration.haystacks])
    tasks = json.dumps([question.task for _, question in asked])
    write_atomically(folder / FILE, save(tensors, {"tasks": tasks}))


def read_calibration(folder: Path) -> Calibration:
    import torch  # here: --help and wrong command lines load no torch
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist; pass the folder of a calibration set.")
    try:
        with safe_open(path, "pt") as file:
            ids, ends, positions = (file.get_tensor(name) for name in ("ids", "ends", "questions"))
            names = file.keys()
            counts = file.get_tensor("counts_as").tolist() if "counts_as" in names else None
            tasks = json.loads((file.metadata() or {})["tasks"])
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a calibration set: {error}.") from error
    # A set of the user's own making may hold anything.
    problem = None
    if not isinstance(tasks, list) or positions.shape != (len(tasks), 5):
        problem = f"its questions are {list(positions.shape)}, and must be five numbers for a task"
    elif any(x.is_floating_point() or x.dtype == torch.bool for x in (positions, ends)):
        problem = "its positions must be whole numbers"
    elif counts is not None and not isinstance(counts, list):
        problem = "what its haystacks count as must be a list"
    elif ids.dim() != 1 or ends.dim() != 1:
        problem = "its tokens and the ends of its haystacks must be a list each"
    elif ends[-1:].tolist() != [len(ids)]:
        problem = f"its last haystack must end at its last token, {len(ids)}"
    elif min(lengths := ends.diff(prepend=ends.new_zeros(1)).tolist()) < 1:
        problem = "a haystack has no tokens"
    elif not all(isinstance(count, int) and count >= 0 for count in counts or ()):
        problem = "a haystack counts as no number of questions"
    elif counts is not None and len(counts) != len(lengths):
        problem = f"{len(lengths)} haystacks count as {len(counts)} numbers of questions"
    if problem is not None:
        raise UserError(f"{path} is not a calibration set: {problem}.")

    questions: list[list[Question]] = [[] for _ in lengths]
    for (number, *bounds), task in zip(positions.tolist(), tasks, strict=True):
        answer, needle = range(bounds[0], bounds[1]), range(bounds[2], bounds[3])
        length = lengths[number] if 0 <= number < len(lengths) else 0
        # A token before the answer predicts its first one.
        has_answer = 1 <= answer.start < answer.stop <= length
        if not has_answer or not 0 <= needle.start <= needle.stop <= length:
            problem = f"a question of {task} does not fit its haystack, of {length} tokens"
            raise UserError(f"{path} is not a calibration set: {problem}.")
        questions[number].append(Question(answer, needle, task))
    if not all(questions):
        raise UserError(f"{path} is not a calibration set: a haystack has no question.")
    parts = zip(ids.tensor_split(ends[:-1]), questions, counts or [0] * len(lengths), strict=True)
    return Calibration([Haystack(ids_T, tuple(asked), count) for ids_T, asked, count in parts])
