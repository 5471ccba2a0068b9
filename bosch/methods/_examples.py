"""Work done example by example, each rank with its share. Results are written to disk at once, so
that a killed method resumes at the next example and ends with the same numbers.

The results are in `examples.jsonl` in the stage's folder: a line that identifies what they depend
on, then one line per example. JSON represents float64 exactly. A line cut off by a kill is dropped.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bosch.method import Inputs
from bosch.run.errors import UserError
from bosch.run.files import append_line, drop_torn_line, open_own_file, read_lines
from bosch.run.fingerprint import fingerprint
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
        inputs.folder,
        title,
        len(haystacks),
        "examples",
        lambda index: measure(haystacks[index]),
        identify(inputs, title),
    )


def identify(inputs: Inputs, method: str) -> str:
    """A hash of what results depend on. A stage refuses other inputs itself, but
    bosch.search_mask may be given any folder."""
    texts = [
        [text.ids_T.tolist(), [[[*q.answer], [*q.needle]] for q in text.questions]]
        for text in inputs.calibration.haystacks
    ]
    facts = {name: getattr(inputs, name) for name in ("model_info", "window_tokens", "seed")}
    return fingerprint(facts | {"method": method, "settings": inputs.settings, "texts": texts})


def measure_each(
    folder: Path,
    title: str,
    count: int,
    unit: str,
    measure: Callable[[int], Result],
    made_of: str = "",
) -> list[Result]:
    """`measure(0)` to `measure(count - 1)`, on every rank. Results in the folder are reused."""
    from bosch.run.group import Group, joined  # imports torch

    path = folder / NOTES

    def resume() -> list[Result]:
        drop_torn_line(path)
        first = next((line.content or {} for line in read_lines(path)), {"made_of": made_of})
        if first.get("made_of") != made_of:
            raise UserError(
                f"{path} holds results of another method, model, calibration set, window or "
                "setting, or is damaged. Name another folder, or remove the file."
            )
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
            if file is not None and not file.tell():
                append_line(file, {"made_of": made_of})
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
    for number, line in read_lines(path)[1:]:
        try:
            if line is None or line["index"] != number - 2:
                raise ValueError("damaged, or another example's")
            notes.append((float(line["seconds"]), dict(line["result"])))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(
                f"{path} is damaged: line {number} is not the result of example {number - 1}. "
                "Remove the file to measure all examples again."
            ) from error
    return notes
