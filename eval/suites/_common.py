"""What suites do alike: results of scores, averages, checks."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import TYPE_CHECKING, Any

from bosch.eval.suites._interface import Result, Scored, Task
from bosch.plugins import suggest
from bosch.run.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any  # transformers takes seconds to import


# The mean in percent as each benchmark computes it. The order of operations decides ties of the
# second digit: 279 of 480 are 58.12 by LongBench's and 58.13 by RULER's.
def percent(scores: list[float]) -> float:
    return round(100 * sum(scores) / len(scores), 2)


def percent_of_ruler(scores: list[float]) -> float:
    return round(sum(scores) / len(scores) * 100, 2)


def percent_of_lm_eval(scores: list[float]) -> float:
    return 100 * sum(scores) / len(scores)


def task_results(
    scored: Sequence[Scored], mean: Callable[[list[float]], float] = percent
) -> list[Result]:
    """A result for each task and each metric of its scores, tasks in the order of their first
    example. `mean` makes the value of the scores, rounded as the benchmark does."""
    tasks: dict[Task, list[Scored]] = {}
    for item in scored:
        tasks.setdefault(item.task, []).append(item)
    results = []
    for task, items in tasks.items():
        items.sort(key=lambda item: item.example.index)
        for metric in items[0].scores:
            scores = [item.scores[metric] for item in items]
            stderr = 100 * stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None
            value = mean(scores)
            results.append(Result(task.name, task.length, metric, value, stderr, len(scores)))
    return results


@dataclass(frozen=True)
class Average:
    """What an average is the plain mean of: results of tasks, and averages that come before it. A
    suite says so once, for its results and for reports (`weights_of`)."""

    name: str
    parts: Sequence[tuple[str, int]]  # task and length of each
    length: int = 0


def compute_averages(
    results: Sequence[Result], averages: Sequence[Average], metric: str
) -> list[Result]:
    """results: one for each task and length, by the metric that counts. metric: what the averages'
    own is called."""
    found = {(result.task, result.length): result for result in results}
    for one in averages:
        parts = [found[part] for part in one.parts]
        found[one.name, one.length] = average(one.name, metric, parts, one.length)
    return [found[one.name, one.length] for one in averages]


def average(name: str, metric: str, parts: Sequence[Result], length: int = 0) -> Result:
    """The unweighted mean of results, whatever their numbers of examples."""
    errors = [part.stderr for part in parts if part.stderr is not None]
    is_known = len(errors) == len(parts)
    stderr = math.sqrt(sum(error**2 for error in errors)) / len(parts) if is_known else None
    value = sum(part.value for part in parts) / len(parts)
    return Result(name, length, metric, value, stderr, sum(part.n for part in parts))


def check_names(names: Iterable[str], known: Iterable[str], kind: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{name!r} is not {kind}: {suggest(name, tuple(known))}")


def check_longest(what: str, lengths: Sequence[int], positions: int) -> None:
    if (longest := max(lengths, default=0)) > positions:
        problem = f"{what} {longest}: the model reads at most {positions:,} tokens"
        raise UserError(f"{problem}. Use smaller lengths, or stretch the positions with --yarn.")
