"""The interface of a suite: a file such as `eval/suites/mine.py`, which `bosch evaluate --suite
mine` and `bosch recover --eval.suites niah mine` run. docs/extending.md has a complete one.

A suite must have

    Settings                                     a frozen dataclass with defaults; it may be empty
    list_tasks(settings) -> list[Task]
    sources(settings, task) -> dict[str, str]    what decides the examples: they are built again
                                                 when one of these or the tokenizer changes
    build_examples(settings, task, tokenizer, limit=None) -> list[Example]
    score(settings, task, example, prediction) -> dict[str, float]     metric -> 0 to 1

`limit` keeps the first examples of the full list. Building and scoring need no model. A suite may
have

    configure(request) -> (Settings, limit)      settings and number of examples from those of the
                                                 command; default: Settings() and `--samples`
    check(settings, positions)                   raises UserError before work begins, for what these
                                                 settings lack; that a task is too long for the
                                                 model is checked without it
    describe(settings) -> str                    a log line about the data
    files(settings) -> dict[str, str]            setting -> the file or folder it names; when their
                                                 content changes, the model is evaluated again
    hashes(settings) -> dict[str, str|None]      the same for what is read of other texts
    floor(example, window_tokens) -> float|None  the score of a model that sees only the end of the
                                                 prompt; None: unknown
    percent(task, scores) -> float               a task's result from its examples' scores, rounded
                                                 as the benchmark does; default: to two digits
    averages(settings, cells) -> list[Average]   what is averaged, of these tasks and lengths, which
                                                 were evaluated; default: nothing, and reports show
                                                 the plain mean of the tasks. They know no settings
                                                 and ask with Settings(): if yours change averages,
                                                 define `reported_scores` too
    groups(scored) -> dict[str, list[Scored]]    examples that get a result of their own, by name
    METRIC                                       the metric that counts in averages and in the floor
    COMPARED_WITH_CALIBRATION = True             `bosch recover` stops if an example contains a
                                                 needle of the calibration set
    VERSION = 2                                  raise it when you change examples or scores
    the fields of Reporting                      how reports show it (_reporting.py)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bosch.config import EvaluationConfig
from bosch.data.needles import DoesNotFitError

Cell = tuple[str, int]  # task, length (0: the task has one length only)
LeftOutError = DoesNotFitError  # of a task that cannot be built: the runner names it and goes on


@dataclass(frozen=True)
class Request:
    """What `configure` may use: the command's settings and facts about the model."""

    config: EvaluationConfig
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
class Average:
    """The plain mean of results of tasks, and of averages that stand before it in the list."""

    name: str
    parts: Sequence[Cell]
    length: int = 0
    metric: str | None = None  # of the parts; None: the one that counts


@dataclass(frozen=True)
class Result:
    task: str  # a task, or an average: a category, `average`
    length: int
    metric: str
    value: float  # 0 to 100
    stderr: float | None  # of the value; None: unknown, as for a single example
    n: int  # number of examples
