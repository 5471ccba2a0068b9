"""What runs are compared by: the averages over NIAH and LongBench, their tasks and categories.

A measure is a weighted mean over cells (a task at a length). The suites write their averages as
rows of their own, and those are what is shown; the weights are for drawing examples anew and for
the means over lengths that no suite writes. Averages under other windows and in longer texts than
the run's own (sweep.py --windows, --lengths) are measures too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bosch.eval.report.statistics import Cell
from bosch.eval.suites import gsm8k, longbench, niah

Row = Mapping[str, Any]
# A suite's headline, one of its tasks and categories, the headline under other conditions.
Kind = Literal["average", "part", "variant"]

SUITES = {"niah": "NIAH", "longbench": "LongBench"}
AVERAGE = "average"
# The suites round a task's percent to two decimals before they average.
ROUNDING = 0.02


@dataclass(frozen=True)
class Measure:
    suite: str
    name: str  # average, a NIAH task, a LongBench category, the condition of a variant
    kind: Kind
    weights: Mapping[Cell, float] = field(hash=False)  # empty: what it is made of is not known

    @property
    def title(self) -> str:
        return self.name if self.kind == "part" else f"{SUITES[self.suite]} {self.name}"

    @property
    def full_title(self) -> str:
        """Where nothing around it names the suite."""
        return self.title if self.suite in self.name else f"{SUITES[self.suite]} {self.name}"

    @property
    def condition(self) -> str:
        return self.name if self.kind == "variant" else ""


@dataclass(frozen=True)
class Score:
    value: float  # percent
    stderr: float  # nan: unknown
    n: int  # examples behind it


def condition(row: Row) -> str:
    """Under which a row was evaluated; empty: as the run asks for it."""
    if "window" in row:
        return f"window {row['window']}"
    return f"{row['text_tokens']:,} tokens" if "text_tokens" in row else ""


def find_measures(rows: Sequence[Row]) -> list[Measure]:
    """The measures of which these rows tell, averages first in their suite."""
    found: list[Measure] = []
    for name in dict.fromkeys(["", *map(condition, rows)]):
        own = [row for row in rows if condition(row) == name]
        measures = [*niah_measures(own), *longbench_measures(own)]
        averages = [m for m in measures if m.kind == "average"]
        found += [replace(m, name=name, kind="variant") for m in averages] if name else measures
    return found


def score(measure: Measure, rows: Sequence[Row]) -> Score | None:
    """The measure in the rows of one model at one step; None where it was not evaluated."""
    own = [r for r in rows if (r["suite"], condition(r)) == (measure.suite, measure.condition)]
    written = niah.METRIC if measure.suite == "niah" else "mean"
    task = AVERAGE if measure.condition else measure.name
    for row in own:
        if (row["task"], row["metric"]) == (task, written) and not row["length"]:
            return _score(row)
    if measure.kind != "part":
        return None  # an average over what happens to be there would be another number
    cells = {(row["task"], row["length"] or 0): row for row in own if row["metric"] == _metric(row)}
    if not measure.weights or any(cell not in cells for cell in measure.weights):
        return None
    parts = [(weight, _score(cells[cell])) for cell, weight in measure.weights.items()]
    return Score(
        sum(weight * part.value for weight, part in parts),
        math.sqrt(sum((weight * part.stderr) ** 2 for weight, part in parts)),
        sum(part.n for _, part in parts),
    )


def niah_measures(rows: Sequence[Row]) -> list[Measure]:
    """The average as the paper has it (over the groups single and multikey at each length), and
    each task as the mean over its lengths."""
    lengths: dict[str, list[int]] = {}
    for row in rows:
        if row["suite"] == "niah" and row["metric"] == niah.METRIC and row["length"]:
            known = lengths.setdefault(row["task"], [])
            if row["length"] not in known:
                known.append(row["length"])
    tasks = {name: found for name, found in lengths.items() if name not in niah.GROUPS}
    if not tasks:
        return []
    groups = [
        [(task, length) for task in members if length in tasks.get(task, [])]
        for members in niah.GROUPS.values()
        for length in sorted({length for found in tasks.values() for length in found})
    ]
    groups = [group for group in groups if group]
    weights = {cell: 1 / len(group) / len(groups) for group in groups for cell in group}
    parts = [
        Measure("niah", task, "part", {(task, n): 1 / len(found) for n in found})
        for task, found in sorted(tasks.items(), key=lambda item: _place(item[0]))
    ]
    return [Measure("niah", AVERAGE, "average", weights), *parts]


def longbench_measures(rows: Sequence[Row]) -> list[Measure]:
    """The plain mean of the categories, and each of them."""
    names = {row["task"] for row in rows if row["suite"] == "longbench"}
    tables = [longbench.category_table(name) for name in ("toy", "paper", "official")]
    table = max(tables, key=lambda table: _fit(table, names))
    found = {category: sets for category, sets in table.items() if category in names}
    if not found:
        return []
    parts = [
        Measure("longbench", category, "part", {(name, 0): 1 / len(sets) for name in sets})
        for category, sets in found.items()
    ]
    weights = {cell: w / len(parts) for part in parts for cell, w in part.weights.items()}
    return [Measure("longbench", AVERAGE, "average", weights), *parts]


def headline_metric(suite: str, task: str) -> str | None:
    """The metric of a task that counts in averages; None: there is only one."""
    if suite == "niah":
        return niah.METRIC
    return gsm8k.HEADLINE if task == longbench.MATH else None


def _metric(row: Row) -> str:
    return headline_metric(row["suite"], row["task"]) or row["metric"]


def _fit(table: Mapping[str, Sequence[str]], names: set[str]) -> tuple[int, int]:
    """How many of a table's data sets were evaluated, and (less is better) how many were not."""
    found = [name in names for sets in table.values() for name in sets]
    return sum(found), -found.count(False)


def _place(task: str) -> tuple[int, str]:
    """The paper's six tasks in its order, others behind them."""
    known = [name for members in niah.GROUPS.values() for name in members]
    return (known.index(task) if task in known else len(known)), task


def _score(row: Row) -> Score:
    stderr = row.get("stderr")
    return Score(row["value"], math.nan if stderr is None else stderr, row.get("n") or 0)
