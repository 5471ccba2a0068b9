"""What the scores of single examples come to: a result for each task, a suite's averages, and
results of groups of examples. Averages are computed here only; a suite says what is averaged
(`averages`, eval/suites/_interface.py), and reports draw intervals by the same (`weights_of`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import stdev
from types import ModuleType
from typing import Any

from bosch.eval.suites._interface import Average, Cell, Result, Scored, Task

AVERAGE = "average"  # the name of a suite's average over everything


def summarize(suite: ModuleType, settings: Any, scored: Sequence[Scored]) -> list[Result]:
    """A result for each task and metric, then the averages, then the groups of examples."""
    results = task_results(scored, getattr(suite, "percent", percent))
    if hasattr(suite, "averages"):
        results += compute_averages(suite, settings, results)
    if hasattr(suite, "groups"):
        for name, members in suite.groups(scored).items():
            results += _results_of(Task(name), members, percent)
    return results


def percent(task: str, scores: Sequence[float]) -> float:
    """The mean, as LongBench rounds it. The order of operations decides ties of the second digit:
    279 of 480 are 58.12 by LongBench's and 58.13 by RULER's (niah.percent)."""
    return round(100 * sum(scores) / len(scores), 2)


def task_results(
    scored: Sequence[Scored], percent: Callable[[str, Sequence[float]], float]
) -> list[Result]:
    """Tasks in the order of their first example."""
    tasks: dict[Task, list[Scored]] = {}
    for one in scored:
        tasks.setdefault(one.task, []).append(one)
    return [r for task, members in tasks.items() for r in _results_of(task, members, percent)]


def _results_of(
    task: Task, members: Iterable[Scored], percent: Callable[[str, Sequence[float]], float]
) -> list[Result]:
    """One for each metric; none without examples."""
    # A sum of floats depends on its order, and a resumed run must end in the same bytes.
    ordered = sorted(members, key=lambda one: one.example.index)
    results = []
    for metric in ordered[0].scores if ordered else ():
        scores = [one.scores[metric] for one in ordered]
        n, value = len(scores), percent(task.name, scores)
        stderr = 100 * stdev(scores) / math.sqrt(n) if n > 1 else None
        results.append(Result(task.name, task.length, metric, value, stderr, n))
    return results


def compute_averages(suite: ModuleType, settings: Any, results: Sequence[Result]) -> list[Result]:
    """Unweighted means of what a suite's averages name, whatever the numbers of examples."""
    metric_that_counts = getattr(suite, "headline_metric", lambda task: None)
    usual = getattr(suite, "METRIC", None)
    by_metric = {(r.task, r.length, r.metric): r for r in results}
    # Of each task the result that counts: by the suite's metric, else by its first one.
    found: dict[Cell, Result] = {}
    for r in results:
        if r.metric == (metric_that_counts(r.task) or usual or r.metric):
            found.setdefault((r.task, r.length), r)
    averages = suite.averages(settings, [*found])
    for one in averages:
        parts = [by_metric[*part, one.metric] if one.metric else found[part] for part in one.parts]
        # Errors of independent parts add up in squares. One unknown error leaves the average's
        # unknown: counted as none, it would make the average look more certain than it is.
        errors = [part.stderr for part in parts if part.stderr is not None]
        is_known = len(errors) == len(parts)
        # `found` grows, since a later average may name this one.
        found[one.name, one.length] = Result(
            task=one.name,
            length=one.length,
            metric=usual or "mean",
            value=sum(part.value for part in parts) / len(parts),
            stderr=math.sqrt(sum(e**2 for e in errors)) / len(parts) if is_known else None,
            n=sum(part.n for part in parts),
        )
    return [found[one.name, one.length] for one in averages]


def weights_of(averages: Sequence[Average], name: str = AVERAGE) -> Mapping[Cell, float]:
    """How much the result of each task and length counts in one of a suite's averages; empty if
    there is none of this name, or if it is not of the metric that counts."""
    parts_of = {(one.name, one.length): one.parts for one in averages if one.metric is None}
    weights: dict[Cell, float] = {}
    waiting = [((name, 0), 1.0)] if (name, 0) in parts_of else []
    while waiting:
        cell, share = waiting.pop(0)
        parts = parts_of.get(cell)
        if parts is None:  # a task
            weights[cell] = weights.get(cell, 0.0) + share
        else:  # its parts take the place of an average: the order decides the last digit of sums
            waiting = [(part, share / len(parts)) for part in parts] + waiting
    return weights
