"""What every suite offers, so that one runner serves all.

To write one, put `eval/suites/mine.py` beside the others: `evaluate_model.py --suite mine` and
`recover.py --eval.suites niah mine` run it. A whole one:

    "Sums of two digits: an example of a suite."

    from dataclasses import dataclass

    from bosch.eval.suites._interface import Example, Task, average, by_task, percent, result_of

    @dataclass(frozen=True)
    class Settings:
        largest: int = 9  # `--options mine.largest=5` sets it

    def list_tasks(settings):
        return [Task("sums")]

    def sources(settings, task):
        return {"largest": str(settings.largest)}

    def build_examples(settings, task, tokenizer, limit=None):
        numbers = range(settings.largest + 1)
        pairs = [(a, b) for a in numbers for b in numbers]
        return [
            Example(index, f"{a} + {b} =", (str(a + b),), max_new_tokens=4)
            for index, (a, b) in enumerate(pairs[:limit])
        ]

    def score(settings, task, example, prediction):
        return {"exact": float(prediction.split()[:1] == list(example.answers))}

    def summarize(settings, scored):
        groups = by_task(scored).items()
        tasks = [result_of(task, "exact", items, percent) for task, items in groups]
        return [*tasks, average("average", "exact", tasks)] if tasks else []

A suite must have

    Settings                                     a frozen dataclass with defaults; it may be empty
    list_tasks(settings) -> list[Task]
    sources(settings, task) -> dict[str, str]    the hashes, versions and settings that decide what
                                                 the examples are: they are built again when one of
                                                 these or the tokenizer changes
    build_examples(settings, task, tokenizer, limit=None) -> list[Example]
    score(settings, task, example, prediction) -> dict[str, float]     metric -> 0 to 1
    summarize(settings, scored) -> list[Result]  one for each task and metric, then the averages

`limit` takes the first examples of the longer list. Building and scoring need no model, so
predictions can be made anywhere and scored again when a metric is mended.

A suite may have

    configure(request) -> (Settings, limit)      its settings from those of the command (Request);
                                                 without it: Settings() and `--samples`
    check(settings, positions)                   UserError, before work begins, for what would fail
                                                 later: a missing package, texts that are too long
    describe(settings) -> str                    a line for the log on the data that is read
    files(settings) -> dict[str, str]            setting -> file or folder it names: an evaluation
                                                 is not reused when their content changes
    floor(example, window_tokens) -> float|None  the score of a model that sees only the end of the
                                                 prompt; None: unknown
    METRIC                                       the metric that counts in averages and in the floor
    COMPARED_WITH_CALIBRATION = True             recover.py stops if an example and the calibration
                                                 set share a needle
    VERSION = 2                                  raise it when the same settings give other examples
                                                 or scores: results of before are not reused then
    title = "Sums"                               its name in reports; default: the file's name
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import stdev
from typing import Any

from bosch.config import JudgingConfig
from bosch.run.errors import UserError


class LeftOutError(UserError):
    """This task cannot be built under these settings. The runner names it and goes on."""


@dataclass(frozen=True)
class Request:
    """What a command asks of the suites it runs."""

    config: JudgingConfig
    positions: int  # tokens that the model reads, stretched by --yarn or not
    essays: str | None = None  # filler text of the calibration set, for suites that need some
    punkt: str | None = None  # folder with the English Punkt data


@dataclass(frozen=True, order=True)
class Task:
    name: str
    length: int = 0  # tokens that prompt and answer may take; 0: the task has one length only


@dataclass(frozen=True)
class Stop:
    """When generation ends, besides the model's own end token and the number of tokens."""

    strings: tuple[str, ...] = ()  # text from the first of these on does not count
    newline_token: bool = False  # the last token of "\n" is a second end token (samsum)
    min_new_tokens: int = 0  # no end token is taken before so many
    # The score cannot change once all answers stand in the text. A runner may stop then.
    when_answered: bool = False


@dataclass(frozen=True)
class Example:
    index: int  # in the task, from 0
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    stop: Stop = Stop()
    facts: Mapping[str, Any] = field(default_factory=dict)  # what scores and reports need besides

    def to_row(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Example":
        stop = Stop(**{**row["stop"], "strings": tuple(row["stop"]["strings"])})
        return cls(**{**row, "answers": tuple(row["answers"]), "stop": stop})


@dataclass(frozen=True)
class Scored:
    """One example with the scores of its prediction."""

    task: Task
    example: Example
    scores: Mapping[str, float]  # metric -> 0 to 1


@dataclass(frozen=True)
class Result:
    task: str  # a task, or an average: a category, `average`
    length: int
    metric: str
    value: float  # 0 to 100
    stderr: float | None  # of the value; None: one example tells nothing of it
    n: int  # examples behind it


def by_task(scored: Sequence[Scored]) -> dict[Task, list[Scored]]:
    """The examples of each task in their order, tasks as they first come."""
    groups: dict[Task, list[Scored]] = {}
    for item in scored:
        groups.setdefault(item.task, []).append(item)
    for items in groups.values():
        items.sort(key=lambda item: item.example.index)
    return groups


def result_of(
    task: Task, metric: str, items: Sequence[Scored], mean: Callable[[list[float]], float]
) -> Result:
    """One task's result. `mean` turns the scores into the value as upstream does, rounding too."""
    scores = [item.scores[metric] for item in items]
    stderr = 100 * stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None
    return Result(task.name, task.length, metric, mean(scores), stderr, len(scores))


def percent(scores: list[float]) -> float:
    """The mean in percent, rounded to two digits."""
    return round(100 * sum(scores) / len(scores), 2)


def average(name: str, metric: str, parts: Sequence[Result], length: int = 0) -> Result:
    """The plain mean of results, each counting the same however many examples it has."""
    errors = [part.stderr for part in parts]
    stderr = None
    if all(error is not None for error in errors):
        stderr = math.sqrt(sum(error**2 for error in errors if error is not None)) / len(parts)
    value = sum(part.value for part in parts) / len(parts)
    return Result(name, length, metric, value, stderr, sum(part.n for part in parts))
