"""Results of evaluations: scores.json, result rows, and tables for the terminal.

A row is {run, step, tokens, suite, task, length, metric, value, stderr, n, dtype}; `step` is null
for a dense model, and `dtype` is the number format it answered in, where that is known. Each
suite's scores.json holds its rows, `results.jsonl` those of a whole run.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from bosch.eval.rows import Row, write_rows
from bosch.eval.settings import Label
from bosch.eval.suites._interface import Result
from bosch.model_files import read_json_object
from bosch.run.errors import UserError
from bosch.run.files import write_atomically
from bosch.run.progress import say, show_table
from bosch.run.stage import follow_reference

SCORES = "scores.json"
PREDICTIONS = "predictions.jsonl"  # of a suite: a row for each example
LM_EVAL = "lm-eval"  # the suite's name of what eval/lm_eval_bridge.py evaluates
DTYPE = "dtype"  # in such a row and in rows of results: the model's number format
EXAMPLE = "example_xxh3"  # in such a row: of the prompt and the answers


def make_rows(
    label: Label, suite: str, results: Iterable[Result], dtype: str | None = None
) -> list[Row]:
    more = {} if dtype is None else {DTYPE: dtype}
    return [asdict(label) | {"suite": suite} | asdict(result) | more for result in results]


def write_scores(folder: Path, content: Row) -> None:
    write_atomically(folder / SCORES, json.dumps(content, indent=1) + "\n")


def read_scores(path: Path) -> Row:
    content = read_json_object(path)
    rows = content.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} is damaged: it has no rows. Delete the file and evaluate again.")
    return content


def collect_results(folder: Path, run: str) -> list[Row]:
    """All rows of the evaluations in `folder`, the dense model's first; writes results.jsonl. Rows
    of a shared evaluation get this run's name."""
    rows = []
    # Shared evaluations too, as the dense model's: the run's folder holds a reference to them.
    for evaluation in sorted(path for path in folder.iterdir() if path.is_dir()):
        for path in sorted(follow_reference(evaluation).glob(f"*/{SCORES}")):
            rows += read_scores(path)["rows"]
    rows.sort(key=lambda row: (-1 if row["step"] is None else row["step"], row["suite"]))
    named = [row | {"run": run} for row in rows]
    write_rows(folder / "results.jsonl", named)
    return named


def show_evaluation(folder: Path) -> None:
    """Print one evaluation: for each suite a line for each task, a column for each length."""
    for path in sorted(folder.glob(f"*/{SCORES}")):
        content = read_scores(path)
        # With one answer string_match_part equals string_match_all.
        rows = [row for row in content["rows"] if row["metric"] != "string_match_part"]
        lengths = sorted({row["length"] for row in rows}, key=lambda length: length or math.inf)
        lines = []
        for task, metric in dict.fromkeys((row["task"], row["metric"]) for row in rows):
            cells = {r["length"]: r for r in rows if (r["task"], r["metric"]) == (task, metric)}
            # lm-eval's own scale, of most metrics 0 to 1.
            digits = 4 if content["suite"] == LM_EVAL else 1
            values = [show_result(cells.get(length), digits) for length in lengths]
            lines.append([task, metric, *values, max(row["n"] for row in cells.values())])
        columns = (f"{length:,}" if length else "score" for length in lengths)
        show_table(content["suite"], ["task", "metric", *columns, "n"], lines)
        for reason in content.get("left_out", ()):
            say(f"left out: {reason}")
        if floor := content.get("floor"):
            # That over all lengths, which has none of its own.
            means = [r for r in floor["rows"] if r["task"] == "average" and not r["length"]]
            value = f"{means[0]['value']:.1f} on average" if means else "see scores.json"
            say(f"floor of a window of {floor['window_tokens']} tokens: {value}")


def show_result(row: Row | None, digits: int = 1) -> str:
    """`31.2 ±1.4`. None: the task was not asked at this length."""
    if row is None:
        return ""
    error = "" if row["stderr"] is None else f" ±{row['stderr']:.{digits}f}"
    return f"{row['value']:.{digits}f}{error}"
