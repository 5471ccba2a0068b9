"""The scores that runs are compared by, read from rows of results. Each suite says which they are
(eval/suites/_reporting.py); its average under other windows and in longer texts than the run's own
(sweep.py --windows, --lengths) is a score too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bosch.eval import lm_eval_bridge
from bosch.eval.suites._reporting import AVERAGE, Cell, ReportedScore, Row, reporting_of


@dataclass(frozen=True)
class ScoreValue:
    value: float  # percent
    stderr: float  # nan: unknown
    n: int  # examples behind it


def condition(row: Row) -> str:
    """The condition that a row was evaluated under; empty: the run's own window and lengths."""
    if "window" in row:
        return f"window {row['window']}"
    return f"{row['text_tokens']:,} tokens" if "text_tokens" in row else ""


def find_scores(rows: Sequence[Row]) -> list[ReportedScore]:
    """The scores that these rows hold, suite by suite. lm-eval's rows hold none: its metrics have
    other scales."""
    by_suite: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["suite"] != lm_eval_bridge.SUITE:
            by_suite.setdefault((row["suite"], condition(row)), []).append(row)
    all_scores: list[ReportedScore] = []
    for (suite, name), members in by_suite.items():
        scores = reporting_of(suite).reported_scores(members)
        averages = [score for score in scores if score.kind == "average"]
        variants = [replace(score, name=name, kind="variant") for score in averages]
        all_scores += variants if name else scores
    return sort_by_suite(all_scores)


def sort_by_suite(scores: Iterable[ReportedScore]) -> list[ReportedScore]:
    listed = list(scores)
    order = {
        suite: (reporting_of(suite).report_order, suite) for suite in {s.suite for s in listed}
    }
    return sorted(listed, key=lambda score: order[score.suite])  # stable


def read_value(score: ReportedScore, rows: Sequence[Row]) -> ScoreValue | None:
    """The score in the rows of one model at one step; None where it was not evaluated."""
    mine = [r for r in rows if (r["suite"], condition(r)) == (score.suite, score.condition)]
    cells = headline_cells(score.suite, mine)
    written = cells.get((AVERAGE if score.condition else score.name, 0))
    if written is not None:
        return value_of(written)
    if score.written_by_suite or not score.weights or any(c not in cells for c in score.weights):
        return None
    parts = [(weight, value_of(cells[cell])) for cell, weight in score.weights.items()]
    return ScoreValue(
        sum(weight * part.value for weight, part in parts),
        math.sqrt(sum((weight * part.stderr) ** 2 for weight, part in parts)),
        sum(part.n for _, part in parts),
    )


def headline_cells(suite: str, rows: Sequence[Row]) -> dict[Cell, Row]:
    """A row for each task and length: that of the metric that counts."""
    headline = reporting_of(suite).headline_metric
    cells: dict[Cell, Row] = {}
    for row in rows:
        if row["metric"] == (headline(row["task"]) or row["metric"]):
            cells.setdefault((row["task"], row["length"] or 0), row)
    return cells


def value_of(row: Row) -> ScoreValue:
    stderr = row.get("stderr")
    return ScoreValue(row["value"], math.nan if stderr is None else stderr, row.get("n") or 0)
