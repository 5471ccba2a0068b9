"""The interface of a suite: a file such as `eval/suites/mine.py`, which `evaluate_model.py --suite
mine` and `recover.py --eval.suites niah mine` run. docs/extending.md has a complete one.

A suite must have

    Settings                                     a frozen dataclass with defaults; it may be empty
    list_tasks(settings) -> list[Task]
    sources(settings, task) -> dict[str, str]    what decides the examples: they are built again
                                                 when one of these or the tokenizer changes
    build_examples(settings, task, tokenizer, limit=None) -> list[Example]
    score(settings, task, example, prediction) -> dict[str, float]     metric -> 0 to 1
    summarize(settings, scored) -> list[Result]  one for each task and metric, then the averages

`limit` keeps the first examples of the full list. Building and scoring need no model. A suite may
have

    configure(request) -> (Settings, limit)      settings and number of examples from those of the
                                                 command; default: Settings() and `--samples`
    check(settings, positions)                   raises UserError before work begins, as for texts
                                                 that are too long for the model
    describe(settings) -> str                    a log line about the data
    files(settings) -> dict[str, str]            setting -> the file or folder it names; when their
                                                 content changes, the model is evaluated again
    floor(example, window_tokens) -> float|None  the score of a model that sees only the end of the
                                                 prompt; None: unknown
    METRIC                                       the metric that counts in averages and in the floor
    COMPARED_WITH_CALIBRATION = True             recover.py stops if an example contains a needle of
                                                 the calibration set
    VERSION = 2                                  raise it when you change examples or scores
    the fields of Reporting                      how reports and TensorBoard show it (_reporting.py)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import stdev
from typing import Any

from bosch.config import JudgingConfig
from bosch.data.needles import DoesNotFitError

LeftOutError = DoesNotFitError  # of a task that cannot be built: the runner names it and goes on


@dataclass(frozen=True)
class Request:
    """What `configure` may use: the command's settings and facts about the model."""

    config: JudgingConfig
    positions: int  # tokens the model can read, with --yarn if it is set
    essays: str | None = None  # filler text of the calibration set
    punkt: str | None = None  # folder with the English Punkt data


@dataclass(frozen=True, order=True)
class Task:
    name: str
    length: int = 0  # tokens of prompt and answer together; 0: the task has only one length


@dataclass(frozen=True)
class Stop:
    """When generation ends, besides the model's end token and the maximal number of tokens."""

    strings: tuple[str, ...] = ()  # text from the first of these on is ignored
    newline_token: bool = False  # the last token of "\n" is a second end token (samsum)
    min_new_tokens: int = 0  # end tokens are not allowed before this many tokens
    # The score cannot change once the text contains all answers, so generation may stop there.
    when_answered: bool = False


@dataclass(frozen=True)
class Example:
    index: int  # in the task, from 0
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    stop: Stop = Stop()
    facts: Mapping[str, Any] = field(default_factory=dict)  # more that scores and reports need

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Example":
        """From what asdict made of it and JSON."""
        stop = Stop(**{**row["stop"], "strings": tuple(row["stop"]["strings"])})
        return cls(**{**row, "answers": tuple(row["answers"]), "stop": stop})


@dataclass(frozen=True)
class Scored:
    """An example with the scores of its prediction."""

    task: Task
    example: Example
    scores: Mapping[str, float]  # metric -> 0 to 1


@dataclass(frozen=True)
class Result:
    task: str  # a task, or an average: a category, `average`
    length: int
    metric: str
    value: float  # 0 to 100
    stderr: float | None  # of the value; None: unknown, as for a single example
    n: int  # number of examples


def by_task(scored: Sequence[Scored]) -> dict[Task, list[Scored]]:
    """Each task's examples by index, tasks in the order of their first example."""
    groups: dict[Task, list[Scored]] = {}
    for item in scored:
        groups.setdefault(item.task, []).append(item)
    for items in groups.values():
        items.sort(key=lambda item: item.example.index)
    return groups


def result_of(
    task: Task, metric: str, items: Sequence[Scored], mean: Callable[[list[float]], float]
) -> Result:
    """One task's result. `mean` makes the value of the scores, rounded as the benchmark does."""
    scores = [item.scores[metric] for item in items]
    stderr = 100 * stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None
    return Result(task.name, task.length, metric, mean(scores), stderr, len(scores))


def percent(scores: list[float]) -> float:
    """The mean in percent, rounded to two digits."""
    return round(100 * sum(scores) / len(scores), 2)


def average(name: str, metric: str, parts: Sequence[Result], length: int = 0) -> Result:
    """The unweighted mean of results, whatever their numbers of examples."""
    errors = [part.stderr for part in parts if part.stderr is not None]
    is_known = len(errors) == len(parts)
    stderr = math.sqrt(sum(error**2 for error in errors)) / len(parts) if is_known else None
    value = sum(part.value for part in parts) / len(parts)
    return Result(name, length, metric, value, stderr, sum(part.n for part in parts))
