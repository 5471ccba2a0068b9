"""Work done example by example, each rank with its share. Results are written at once, so that a
killed method goes on with the examples that are missing and ends with the same numbers.

`examples.jsonl` in the stage's folder has one line per example; JSON represents float64 exactly.
The checksum of a line also covers what the result depends on: results of another method, model or
calibration set count as damaged, as do incomplete lines, and those examples are measured again."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from bosch.method import Inputs
from bosch.methods._settings import METHODS
from bosch.plugins import own_files
from bosch.run.dist import Ranks, start_ranks
from bosch.run.files import append_line, drop_torn_line, open_own_file, read_lines
from bosch.run.fingerprint import fingerprint
from bosch.run.progress import track

if TYPE_CHECKING:
    from bosch.calibration import Haystack

FILE = "examples.jsonl"
Result = dict[str, Any]  # of one example: statistics by name, as JSON


def measure_haystacks(
    inputs: Inputs, method: str, measure: "Callable[[Haystack], Result]"
) -> list[Result]:
    """The results of `measure` on each haystack, on every rank. Those in the folder are reused."""
    path, made_of = inputs.folder / FILE, identify(inputs, method)
    haystacks = inputs.calibration.haystacks
    numbers = range(len(haystacks))

    def resume() -> dict[int, Result]:
        drop_torn_line(path)  # that a kill has left: the next line must not be joined to it
        return {line["index"]: line["result"] for _, line in read_lines(path, made_of) if line}

    def measure_mine() -> Result | None:
        if ranks.rank >= len(missing):  # the last round has fewer than ranks
            return None
        index, began = missing[ranks.rank], time.monotonic()
        result = measure(haystacks[index])
        seconds = round(time.monotonic() - began, 3)
        return {"index": index, "seconds": seconds, "result": result}

    start_ranks()
    ranks = Ranks.current()
    results = ranks.from_rank_0(resume)
    opened = open_own_file(path, "ab") if ranks.rank == 0 else nullcontext()
    with opened as file, track(method, len(numbers), "examples", done=len(results)) as bar:
        # Round by round: each rank takes one of the missing examples, and all write down what came
        # of it. So a kill costs one round, and it does not matter how many ranks go on.
        while missing := [index for index in numbers if index not in results]:
            for line in filter(None, ranks.gather(ranks.all_succeed(measure_mine))):
                if file is not None:
                    append_line(file, line, made_of)
                results[line["index"]] = line["result"]
                bar.advance()
    return [results[index] for index in numbers]


# Rankings whose scores with sinks are others than those that runs may have in common.
CHANGED = {"proxy": 2, "qada": 2}


def identify(inputs: Inputs, method: str) -> str:
    """A hash of what results depend on: bosch.search_mask may be given any folder."""
    from bosch.search.outcomes import facts_of  # imports torch

    haystacks = [
        [haystack.ids_T.tolist(), [[[*q.answer], [*q.needle]] for q in haystack.questions]]
        for haystack in inputs.calibration.haystacks
    ]
    names = ("model_info", "window_tokens", "seed", "settings")
    facts = {name: getattr(inputs, name) for name in names} | facts_of(inputs.model)
    if inputs.sink.kind != "none":
        facts["sink"] = str(inputs.sink)
        if method in CHANGED:
            facts["version"] = CHANGED[method]
    if own := own_files((METHODS, method)):  # a method of one's own counts by its content
        facts["plugins"] = own
    return fingerprint(facts | {"method": method, "haystacks": haystacks})
