"""Examples on disk, built once for each tokenizer, task and seed, and shared by all runs.

    <folder>/examples-<fingerprint>/first-00500.jsonl    the fields of each Example
                                    first-00500.json     what they were built from, and a checksum

Whoever needs fewer examples takes the first ones of a longer file.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bosch.eval.rows import read_rows, write_rows
from bosch.eval.settings import SuiteRun
from bosch.eval.suites._interface import Example, Task
from bosch.run.files import DamagedArtifactError, read_sealed_json, write_sealed_json
from bosch.run.fingerprint import fingerprint, hash_file, plain
from bosch.run.lock import FolderLock
from bosch.run.progress import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 1  # raised when the same task, sources and tokenizer give other examples
ALL = 10**9  # stands for "every example there is" in the order of files


def load_examples(
    run: SuiteRun,
    task: Task,
    tokenizer: "PreTrainedTokenizerBase",
    tokenizer_hash: str,
    folder: Path,
) -> list[Example]:
    """The first examples of a task, read from `folder` or built and saved there.

    Safe for several processes at once: one builds, the others wait. LeftOutError if the task cannot
    be built under these settings.
    """
    facts = describe_examples(run, task, tokenizer_hash)
    shared = folder / f"examples-{fingerprint(facts)[:16]}"
    path = find_file(shared, run.limit)
    if path is None:
        with FolderLock(shared, say, wait=True):
            path = find_file(shared, run.limit)  # another process may have built it meanwhile
            if path is None:
                examples = run.suite.build_examples(run.settings, task, tokenizer, run.limit)
                path = write_examples(shared, examples, run.limit, facts)
    seal = path.with_suffix(".json")
    made_from = read_sealed_json(seal, "xxh3", *facts)
    is_of_task = {name: made_from[name] for name in facts} == plain(facts)
    if not path.is_file() or not is_of_task or hash_file(path) != made_from["xxh3"]:
        raise DamagedArtifactError(
            f"{path} is damaged: it differs from what {seal.name} says. "
            "Delete both files; they are built again."
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
    return facts | run.version_facts


def find_file(folder: Path, limit: int | None) -> Path | None:
    """The smallest file with enough examples."""
    needed = ALL if limit is None else limit
    seals = sorted(folder.glob("first-*.json"), key=number_of)
    return next((s.with_suffix(".jsonl") for s in seals if number_of(s) >= needed), None)


def number_of(path: Path) -> int:
    number = path.stem.removeprefix("first-")
    return ALL if number == "all" else int(number)


def write_examples(
    folder: Path, examples: list[Example], limit: int | None, facts: dict[str, Any]
) -> Path:
    path = folder / f"first-{'all' if limit is None else f'{limit:05}'}.jsonl"
    write_rows(path, [asdict(example) for example in examples])
    seal = facts | {"examples": len(examples), "xxh3": hash_file(path)}
    write_sealed_json(path.with_suffix(".json"), seal)
    return path
