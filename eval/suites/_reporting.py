"""How reports show a suite's results: its file may define any of the names that are
fields of `Reporting`; the others have defaults."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import ModuleType
from typing import Any, Literal

from bosch.eval.averages import AVERAGE, weights_of
from bosch.eval.settings import SUITES
from bosch.eval.suites._interface import Cell
from bosch.plugins import list_plugins, load_plugin

Row = Mapping[str, Any]  # one result, as eval/results.py writes them
Samples = Mapping[Cell, Mapping[int, float]]  # index of an example -> its score, percent
# The suite's headline, one of its tasks or categories, the headline under other conditions (another
# window, longer texts); or the loss on held-out texts, negative, so that more is better too.
Kind = Literal["average", "part", "variant", "loss"]


@dataclass(frozen=True)
class ReportedScore:
    """A score that reports show: a result of this name, else the weighted mean of results."""

    suite: str
    name: str  # `average`, a task, a category; of a variant its condition
    kind: Kind
    # What it is the mean of; empty: unknown. In another run it may be the mean of other lengths.
    weights: Mapping[Cell, float] = field(compare=False)
    # The suite computes it: where it wrote none, there is none. An average over the tasks that
    # happen to be there would be another score.
    written_by_suite: bool = field(default=False, compare=False)

    @property
    def headline(self) -> str:
        """As the one score of its suite, or one of several."""
        title = self.name if self.kind == "loss" else reporting_of(self.suite).title
        return f"{title} {self.name}" if self.kind == "part" else title

    @property
    def title(self) -> str:
        return self.name if self.kind in ("part", "loss") else f"{self.headline} {self.name}"


@dataclass(frozen=True)
class Reporting:
    title: str  # the suite's name in reports; default: the name of its file
    # All rows of the suite in one run, of every step -> its average, then its parts. Default: the
    # result `average`, or the mean of all tasks if there is none; each task is a part.
    reported_scores: Callable[[Sequence[Row]], list[ReportedScore]]
    # The metric of a task that counts. Default: METRIC, if the suite has one; None: the first one.
    headline_metric: Callable[[str], str | None]
    parts_title: str = "tasks"
    # Tasks that ask the same at every length: their questions are drawn once for an interval.
    tasks_alike: tuple[str, ...] = ()
    # In the table by length. Default, or empty: every task.
    tasks_by_length: tuple[str, ...] = ()
    report_order: float = math.inf  # place among the suites; default: at the end, by name


def condition(row: Row) -> str:
    """The condition that a row was evaluated under; empty: the run's own window and lengths."""
    if "window" in row:
        return f"window {row['window']}"
    return f"{row['text_tokens']:,} tokens" if "text_tokens" in row else ""


def reporting_of(suite: str) -> Reporting:
    """What the suite's file defines, with the defaults for the rest. A suite whose file is not
    here, as of a run from another machine, has the defaults."""
    module = load_plugin(SUITES, suite) if suite in list_plugins(SUITES) else None
    usual = Reporting(
        title=suite,
        reported_scores=partial(average_and_tasks, suite, module),
        headline_metric=lambda task: getattr(module, "METRIC", None),
    )
    own = [field.name for field in fields(Reporting) if hasattr(module, field.name)]
    return replace(usual, **{name: getattr(module, name) for name in own})


def average_and_tasks(
    suite: str, module: ModuleType | None, rows: Sequence[Row]
) -> list[ReportedScore]:
    """The suite's average, by default the plain mean of the tasks, and each task as the plain mean
    over its lengths."""
    tasks = [row for row in rows if row["task"] != AVERAGE]
    parts = over_lengths(suite, tasks)
    weights: Mapping[Cell, float] = {
        cell: weight / len(parts) for part in parts for cell, weight in part.weights.items()
    }
    if module is not None and hasattr(module, "averages"):
        cells = [cell for part in parts for cell in part.weights]
        weights = weights_of(module.averages(module.Settings(), cells))
    is_written = len(tasks) < len(rows)
    return [ReportedScore(suite, AVERAGE, "average", weights, is_written), *parts]


def over_lengths(suite: str, rows: Sequence[Row]) -> list[ReportedScore]:
    """Each task as the plain mean over its lengths."""
    tasks: dict[str, list[Cell]] = {}
    for task, length in dict.fromkeys((row["task"], row["length"] or 0) for row in rows):
        tasks.setdefault(task, []).append((task, length))
    means = {task: dict.fromkeys(cells, 1 / len(cells)) for task, cells in tasks.items()}
    return [ReportedScore(suite, task, "part", weights) for task, weights in means.items()]
