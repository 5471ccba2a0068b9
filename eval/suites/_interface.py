"""What every suite offers, so that one runner serves all. A suite is a module with these names:

    Settings                                     a frozen dataclass: where the data is, which tasks
    list_tasks(settings) -> list[Task]
    sources(settings, task) -> dict[str, str]    hashes, versions and settings that decide what the
                                                 examples are: with the tokenizer they name them
    build_examples(settings, task, tokenizer, limit=None) -> list[Example]
    score(settings, task, example, prediction) -> dict[str, float]     metric -> 0 to 1
    summarize(settings, scored) -> list[Result]  a result a task and metric, then the averages

`limit` takes the first examples: the same ones that a longer list begins with. Building and scoring
need no model, so predictions can be made anywhere and judged again when a metric is mended.

How reports and TensorBoard show a suite is optional; _reporting.py has the defaults:

    title = "Mine"                     name in reports; default: the name of the file
    parts_title = "tasks"              what its parts are called, such as "categories"
    report_order = 4                   place among the suites; default: at the end, by name
    tasks_by_length = ("retrieval",)   rows of the table by length; default: all tasks with lengths
    headline_metric(task) -> str | None            the metric that counts; default: the first one
    reported_scores(rows) -> list[ReportedScore]   the average and its parts; default: each task
    charts(rows) -> dict[str, list[str]]           chart -> regular expressions of TensorBoard tags
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import stdev
from typing import Any

from bosch.run.errors import UserError


class LeftOutError(UserError):
    """This task cannot be made under these settings, others can: a runner names it and goes on."""


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


def average(name: str, metric: str, parts: Sequence[Result], length: int = 0) -> Result:
    """The plain mean of results, each counting the same however many examples it has."""
    errors = [part.stderr for part in parts]
    stderr = None
    if all(error is not None for error in errors):
        stderr = math.sqrt(sum(error**2 for error in errors if error is not None)) / len(parts)
    value = sum(part.value for part in parts) / len(parts)
    return Result(name, length, metric, value, stderr, sum(part.n for part in parts))
