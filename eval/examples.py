"""Examples on disk, built once for each tokenizer, task and seed, and shared by all runs.

    <folder>/examples-<fingerprint>/first-00500.jsonl    rows of Example.to_row
                                    first-00500.json     what they were made of, and their checksum

A file of more examples serves whoever asks for fewer: those are its first.
"""

from pathlib import Path
from typing import Any

from bosch.eval.rows import read_rows, write_rows
from bosch.eval.settings import SuiteRun
from bosch.eval.suites._interface import Example, Task
from bosch.run.fingerprint import fingerprint, hash_file
from bosch.run.lock import FolderLock
from bosch.run.manifest import DamagedArtifactError, read_sealed_json, write_sealed_json
from bosch.run.progress import say

VERSION = 1  # raised when the same task, sources and tokenizer give other examples
ALL = 10**9  # the number of a file that holds every example there is


def load_examples(
    run: SuiteRun, task: Task, tokenizer: Any, tokenizer_hash: str, folder: Path
) -> list[Example]:
    """The first examples of a task, from `folder` or built and left there.

    Several processes may ask at once: one builds, the others wait. LeftOutError if the task cannot
    be made under these settings.
    """
    facts = describe_examples(run, task, tokenizer_hash)
    place = folder / f"examples-{fingerprint(facts)[:16]}"
    path = find_file(place, run.limit)
    if path is None:
        with FolderLock(place, say, wait=True):
            path = find_file(place, run.limit)  # someone else may have built it meanwhile
            if path is None:
                examples = run.suite.build_examples(run.settings, task, tokenizer, run.limit)
                path = write_examples(place, examples, run.limit, facts)
    seal = path.with_suffix(".json")
    if not path.is_file() or hash_file(path) != read_sealed_json(seal)["xxh3"]:
        raise DamagedArtifactError(
            f"{path} is damaged: it is not what {seal.name} beside it says. "
            "Delete both, and they are made anew."
        )
    return [Example.from_row(row) for row in read_rows(path)[: run.limit]]


def describe_examples(run: SuiteRun, task: Task, tokenizer_hash: str) -> dict[str, Any]:
    facts = {
        "version": VERSION,
        "suite": run.name,
        "task": task.name,
        "length": task.length,
        "sources": run.suite.sources(run.settings, task),
        "tokenizer": tokenizer_hash,
    }
    return facts | run.version


def find_file(place: Path, limit: int | None) -> Path | None:
    """The smallest file that has enough examples."""
    wanted = ALL if limit is None else limit
    seals = sorted(place.glob("first-*.json"), key=number_of)
    return next((s.with_suffix(".jsonl") for s in seals if number_of(s) >= wanted), None)


def number_of(path: Path) -> int:
    number = path.stem.removeprefix("first-")
    return ALL if number == "all" else int(number)


def write_examples(
    place: Path, examples: list[Example], limit: int | None, facts: dict[str, Any]
) -> Path:
    path = place / f"first-{'all' if limit is None else f'{limit:05}'}.jsonl"
    write_rows(path, [example.to_row() for example in examples])
    seal = facts | {"examples": len(examples), "xxh3": hash_file(path)}
    write_sealed_json(path.with_suffix(".json"), seal)
    return path
