"""Work done example by example, each result noted on the disk as soon as it is there: a killed
method goes on at the next example and ends in the same numbers.

The notes are `examples.jsonl` in the stage's folder, a line an example. Numbers in JSON are exact
for float64. A line that a kill tore is dropped.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bosch.run.progress import track

NOTES = "examples.jsonl"


def measure_each(
    folder: Path, title: str, count: int, unit: str, measure: Callable[[int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """`measure(0)` to `measure(count - 1)`, those not made again whose results are noted in the
    folder.
    """
    path = folder / NOTES
    results = [line["result"] for line in _read(path)][:count]
    with path.open("a") as file, track(title, count, unit, done=len(results)) as bar:
        for index in range(len(results), count):
            began = time.monotonic()
            result = measure(index)
            line = {"seconds": round(time.monotonic() - began, 3), "result": result}
            file.write(json.dumps(line, allow_nan=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
            results.append(result)
            bar.advance()
    return results


def measured_seconds(folder: Path) -> float | None:
    """Seconds spent on all examples, over all attempts; None where there are none."""
    lines = _read(folder / NOTES)
    return sum(line["seconds"] for line in lines) if lines else None


def _read(path: Path) -> list[dict[str, Any]]:
    """The whole lines; what stands behind the last of them is cut off the file."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return [json.loads(line) for line in content[:whole].decode().splitlines()]
