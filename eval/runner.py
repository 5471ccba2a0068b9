"""Judges one model by several suites: predictions sample by sample, then scores.

    <folder>/niah/predictions.jsonl    a row an example, with its text and its scores
                  scores.json          results, rows, the floor of a windowed model
    <folder>/longbench/...

A prediction is appended and forced to the disk as soon as it is there, so that a killed run goes on
behind it, with as many ranks as it then has. Each rank writes a file of its own; rank 0 waits for
the others by their files, puts everything in order and scores it. Nothing is a collective.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from bosch.data.tokenizer_files import describe_tokenizer
from bosch.eval.examples import load_examples
from bosch.eval.generate import Generator, Key
from bosch.eval.results import make_rows, write_scores
from bosch.eval.rows import parse_rows, read_rows, write_rows
from bosch.eval.settings import FAST, GenerationSettings, Label, SuiteRun
from bosch.eval.suites._interface import Example, LeftOutError, Scored, Task
from bosch.run.fingerprint import plain
from bosch.run.folder import RunFolder
from bosch.run.lines import append_line, whole_lines
from bosch.run.progress import say, track

PREDICTIONS = "predictions.jsonl"
WORK = ".work"  # what ranks have predicted, until it is put together


@dataclass(frozen=True)
class Evaluation:
    """Everything that an evaluation needs besides its folder."""

    load_model: Callable[[], Any]  # called only if a prediction is missing
    tokenizer: Any
    suites: Sequence[SuiteRun]
    examples_folder: Path  # where runs share examples
    label: Label
    generation: GenerationSettings = FAST
    max_positions: int | None = None  # an example that needs more is an error
    window_tokens: int | None = None  # of a windowed model: its floor is counted
    rank: int = 0
    world: int = 1

    @cached_property
    def tokenizer_hash(self) -> str:
        return describe_tokenizer(self.tokenizer).hash


def evaluate(evaluation: Evaluation, folder: Path) -> None:
    """Predict what is not yet predicted in `folder`, then score everything. All ranks call it; rank
    0 returns when the scores are written, the others when their share is predicted."""
    todo = [run for run in evaluation.suites if not (folder / run.name / PREDICTIONS).is_file()]
    if todo:
        # Leaving this block, rank 0 waits until every rank has.
        with RunFolder(folder / WORK, evaluation.rank, evaluation.world, say):
            predict(evaluation, todo, folder / WORK)
    if evaluation.rank == 0:
        for run in evaluation.suites:
            score(evaluation, run, folder)
        shutil.rmtree(folder / WORK, ignore_errors=True)


# -------------------------------------------------------------------------------- predictions


def predict(evaluation: Evaluation, runs: Sequence[SuiteRun], work: Path) -> None:
    """This rank's share of the examples that nobody has predicted yet."""
    generator: Generator | None = None
    for run in runs:
        done = {key_of(row) for row in read_predictions(work, run.name)}
        left_out: list[str] = []
        share = [
            (task_key(task, example), example)
            for task, examples in all_examples(evaluation, run, left_out)
            for example in share_of_rank(examples, evaluation.rank, evaluation.world)
        ]
        for reason in left_out:
            say(f"left out: {reason}")
        missing = [(key, example) for key, example in share if key not in done]
        if not missing:
            continue
        if generator is None:
            model, settings = evaluation.load_model(), evaluation.generation
            generator = Generator(model, evaluation.tokenizer, settings, evaluation.max_positions)
        path = work / f"{run.name}-{evaluation.rank}.jsonl"
        whole_lines(path)  # what a kill left of a line would spoil the next one
        title = f"evaluate {run.name}" + (" on rank 0" if evaluation.world > 1 else "")
        with (
            path.open("ab") as file,
            track(title, len(share), "examples", len(share) - len(missing)) as bar,
        ):
            for generation in generator.generate(missing):
                task, length, index = generation.key
                row = {
                    "task": task,
                    "length": length,
                    "index": index,
                    "prediction": generation.text,
                    "tokens": len(generation.tokens),
                    "ended": generation.ended,
                }
                append_line(file, row)
                bar.advance()


def all_examples(
    evaluation: Evaluation, run: SuiteRun, left_out: list[str]
) -> Iterator[tuple[Task, list[Example]]]:
    """Each task with its examples. What cannot be made is left out, and `left_out` says why."""
    for task in run.suite.list_tasks(run.settings):
        try:
            tokenizer, name = evaluation.tokenizer, evaluation.tokenizer_hash
            examples = load_examples(run, task, tokenizer, name, evaluation.examples_folder)
        except LeftOutError as error:
            left_out.append(str(error))
            continue
        yield task, examples


def share_of_rank(examples: Sequence[Example], rank: int, world: int) -> list[Example]:
    """Neighbors, whose prompts begin alike, cut so that all parts hold about as much text."""
    total = sum(len(example.prompt) for example in examples)
    mine, before = [], 0
    for example in sorted(examples, key=lambda example: example.prompt):
        middle = before + len(example.prompt) / 2
        if rank * total <= middle * world < (rank + 1) * total:
            mine.append(example)
        before += len(example.prompt)
    return mine


def read_predictions(work: Path, suite: str) -> list[dict[str, Any]]:
    """The rows of all ranks, of this attempt and earlier ones."""
    rows = []
    for path in sorted(work.glob(f"{suite}-*.jsonl")):
        content = path.read_bytes()
        rows += parse_rows(content[: content.rfind(b"\n") + 1], str(path))
    return rows


def task_key(task: Task, example: Example) -> Key:
    return task.name, task.length, example.index


def key_of(row: Mapping[str, Any]) -> Key:
    return row["task"], row["length"], row["index"]


# ------------------------------------------------------------------------------------- scores


def score(evaluation: Evaluation, run: SuiteRun, folder: Path) -> None:
    """Put the predictions in the order of tasks and examples, each with its scores, and sum up."""
    path = folder / run.name / PREDICTIONS
    found = read_rows(path) if path.is_file() else read_predictions(folder / WORK, run.name)
    predictions = {key_of(row): row for row in found}
    left_out: list[str] = []
    rows, scored, floors = [], [], []
    for task, examples in all_examples(evaluation, run, left_out):
        for example in examples:
            row = predictions[task_key(task, example)]
            scores = run.suite.score(run.settings, task, example, row["prediction"])
            rows.append(row | {"scores": scores})
            light = replace(example, prompt="")  # the prompts of all tasks are gigabytes
            scored.append(Scored(task, light, scores))
            if evaluation.window_tokens is None or not hasattr(run.suite, "floor"):
                continue
            share = run.suite.floor(example, evaluation.window_tokens)
            if share is not None:
                floors.append(Scored(task, light, dict.fromkeys(scores, share)))
    write_rows(path, rows)
    summarize = partial(run.suite.summarize, run.settings)
    content = {
        "suite": run.name,
        "settings": plain(run.settings),
        "limit": run.limit,
        "left_out": left_out,
        "rows": make_rows(evaluation.label, run.name, summarize(scored)),
    }
    if floors:
        results = summarize(floors)
        if metric := getattr(run.suite, "METRIC", None):
            results = [result for result in results if result.metric == metric]
        content["floor"] = {
            "window_tokens": evaluation.window_tokens,
            "rows": make_rows(evaluation.label, run.name, results),
        }
    write_scores(folder / run.name, content)
