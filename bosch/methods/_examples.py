"""Work done example by example, each rank with its share. Results are written to disk at once, so
that a killed method resumes at the next example and ends with the same numbers.

The results are in `examples.jsonl` in the stage's folder, one line per example. JSON represents
float64 exactly. A line cut off by a kill is dropped.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bosch.method import Inputs
from bosch.run.errors import UserError
from bosch.run.inside import open_own_file
from bosch.run.lines import append_line, drop_torn_line, read_lines
from bosch.run.progress import track

if TYPE_CHECKING:
    from bosch.calibration import Haystack

NOTES = "examples.jsonl"
Result = dict[str, Any]  # of one example: statistics by name, as JSON


def measure_haystacks(
    inputs: Inputs, title: str, measure: "Callable[[Haystack], Result]"
) -> list[Result]:
    """The results of `measure` on each calibration text."""
    haystacks = inputs.calibration.haystacks
    return measure_each(
        inputs.folder, title, len(haystacks), "examples", lambda index: measure(haystacks[index])
    )


def measure_each(
    folder: Path, title: str, count: int, unit: str, measure: Callable[[int], Result]
) -> list[Result]:
    """`measure(0)` to `measure(count - 1)`, on every rank. Results in the folder are reused."""
    from bosch.run.group import Group, joined  # imports torch

    path = folder / NOTES

    def resume() -> list[Result]:
        drop_torn_line(path)
        return [result for _, result in read_notes(path)][:count]

    def measure_mine() -> tuple[float, Result] | None:
        if (index := len(results) + ranks.rank) >= count:
            return None
        began = time.monotonic()
        result = measure(index)
        return round(time.monotonic() - began, 3), result

    with joined():
        ranks = Group.current()
        results = ranks.from_rank_0(resume)
        opened = open_own_file(path, "ab") if ranks.rank == 0 else nullcontext()
        with opened as file, track(title, count, unit, done=len(results)) as bar:
            while len(results) < count:
                for found in ranks.gather(ranks.all_succeed(measure_mine)):
                    if found is None:
                        continue
                    seconds, result = found
                    if file is not None:
                        line = {"index": len(results), "seconds": seconds, "result": result}
                        append_line(file, line)
                    results.append(result)
                    bar.advance()
    return results


def measured_seconds(folder: Path) -> float | None:
    """Seconds spent on all examples, over all attempts. None if there are no examples."""
    notes = read_notes(folder / NOTES)
    return sum(seconds for seconds, _ in notes) if notes else None


def read_notes(path: Path) -> list[tuple[float, Result]]:
    """Seconds and result of each example so far."""
    notes = []
    for number, line in read_lines(path):
        try:
            index = (line or {}).get("index", number - 1)  # earlier versions wrote none
            if line is None or index != number - 1:
                raise ValueError("damaged, or another example's")
            notes.append((float(line["seconds"]), dict(line["result"])))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(
                f"{path} is damaged: line {number} is not the result of example {number}. Remove "
                "the file to measure all examples again."
            ) from error
    return notes
