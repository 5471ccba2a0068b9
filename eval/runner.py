"""Evaluates one model by several suites: predictions example by example, then scores.

    <folder>/SUITE/predictions.jsonl    a row for each example: prediction and scores
                   scores.json          result rows, and the floor of a windowed model
    <examples>/examples-<fingerprint>/first-00500.jsonl    the fields of each Example
                                      first-00500.json     what they were built from, a checksum

Each prediction is appended and synced to disk at once, so a killed run continues after the last
one, with any number of ranks. Each rank writes its own file, without collectives; when all have,
rank 0 orders and scores the predictions. Examples are built once for each tokenizer, task and seed,
and shared by all runs; whoever needs fewer takes the first ones of a longer file.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from bosch.data.tokenizer_files import describe_tokenizer
from bosch.eval.averages import summarize
from bosch.eval.engine_vllm import EngineGenerator
from bosch.eval.generate import Generator, Key
from bosch.eval.results import DTYPE, EXAMPLE, PREDICTIONS, SCORES, make_rows, write_scores
from bosch.eval.rows import Row, read_rows, write_rows
from bosch.eval.settings import FAST, GenerationSettings, Label, SuiteRun
from bosch.eval.suites._interface import Example, LeftOutError, Scored, Task
from bosch.model_files import read_json_object
from bosch.run import files
from bosch.run.dist import FolderLock
from bosch.run.errors import UserError
from bosch.run.files import DamagedArtifactError, append_line, read_sealed_json
from bosch.run.fingerprint import fingerprint, hash_file, plain
from bosch.run.progress import say, say_once, track

CHECKSUM = "predictions_xxh3"  # in scores.json
WORK = ".work"  # the ranks' predictions, until they are merged
EXAMPLES_VERSION = 1  # raised when the same task, sources and tokenizer give other examples
# Characters of a prompt that take about as long as one new token, which costs a pass over all
# weights. Between a small model that decodes alone (an H200, 1.7B: 57 ms for a new token, 4 us for
# a character) and a large one that decodes 16 answers at once. The order of magnitude is enough:
# each task is divided among all ranks.
CHARACTERS_PER_NEW_TOKEN = 2_000


@dataclass(frozen=True)
class Evaluation:
    """Everything an evaluation needs except its folder."""

    load_model: Callable[[], Any]  # or an engine; called only if predictions are missing
    tokenizer: PreTrainedTokenizerBase
    suites: Sequence[SuiteRun]
    examples_folder: Path  # examples shared by runs
    label: Label
    generation: GenerationSettings = FAST
    max_positions: int | None = None  # an example that needs more raises UserError
    window_tokens: int | None = None  # of a hybrid, whose floor is counted; None: a dense model
    rank: int = 0
    world: int = 1

    @property
    def place(self) -> str:
        """Covered by the checksums of predictions: those of another step are not used."""
        return f"predictions at step {self.label.step}"

    @cached_property
    def tokenizer_hash(self) -> str:
        return describe_tokenizer(self.tokenizer).hash


def evaluate(evaluation: Evaluation, folder: Path) -> Callable[[], None]:
    """Make the predictions that `folder` lacks; every rank calls this for its share. Returns what
    rank 0 does when all ranks have: score them."""
    work, rank, world = folder / WORK, evaluation.rank, evaluation.world
    generator: Generator | None = None
    files.refuse_unless_ours(work, is_folder=True)
    for run in evaluation.suites:
        if (folder / run.name / PREDICTIONS).is_file():
            continue
        work.mkdir(parents=True, exist_ok=True)
        # Of all ranks: an earlier attempt may have had more or fewer of them than this one.
        done = read_predictions(work, run.name, evaluation.place)
        share = share_of_rank(evaluation, run)
        missing = [(key, example) for key, example in share if key not in done]
        if not missing:
            continue
        if generator is None:
            # Not before a prediction is missing: loading takes minutes.
            kind = EngineGenerator if evaluation.generation.engine == "vllm" else Generator
            generator = kind(
                evaluation.load_model(),
                evaluation.tokenizer,
                evaluation.generation,
                evaluation.max_positions,
            )
        refuse_another_dtype(work, done.values(), generator.dtype)
        path = work / f"{run.name}-{rank}.jsonl"
        # A kill can leave half a line; the next one would be appended to it, and both lost.
        files.drop_torn_line(path)
        title = f"evaluate {run.name}" + (" on rank 0" if world > 1 else "")
        with (
            files.open_own_file(path, "ab") as file,
            track(title, len(share), "examples", len(share) - len(missing)) as bar,
        ):
            for job in generator.generate(missing):
                row: Row = dict(zip(("task", "length", "index"), job.key, strict=True))
                row |= {"prediction": job.text, "tokens": len(job.tokens), "ended": job.ended}
                row[DTYPE] = generator.dtype
                append_line(file, row, evaluation.place)
                bar.advance()

    return partial(score_all, evaluation, folder)


def share_of_rank(evaluation: Evaluation, run: SuiteRun) -> list[tuple[Key, Example]]:
    """The examples of a suite that this rank answers, task by task."""
    left_out: list[str] = []
    share, lengths, loads = [], set(), [0] * evaluation.world
    for task, examples in all_examples(evaluation, run, left_out):
        lengths.add(task.length)
        mine = deal(examples, loads)[evaluation.rank]
        share += [((task.name, task.length, example.index), example) for example in mine]
    for task in run.tasks:
        if task.length not in lengths:
            # An average over the other lengths would look like one over all of them.
            problem = f"none of the {run.name} tasks can be built in {task.length} tokens"
            raise UserError(f"{problem}, so that length would be missing; {left_out[0]}")
    for reason in left_out:
        say_once(f"left out: {reason}")
    return share


def score_all(evaluation: Evaluation, folder: Path) -> None:
    for run in evaluation.suites:
        score(evaluation, run, folder)
    shutil.rmtree(folder / WORK, ignore_errors=True)


def all_examples(
    evaluation: Evaluation, run: SuiteRun, left_out: list[str]
) -> Iterator[tuple[Task, list[Example]]]:
    """Each task with its examples. Of tasks that cannot be built `left_out` gets the reason."""
    tokenizer, known_by = evaluation.tokenizer, evaluation.tokenizer_hash
    for task in run.tasks:
        try:
            yield task, load_examples(run, task, tokenizer, known_by, evaluation.examples_folder)
        except LeftOutError as error:
            left_out.append(str(error))


def deal(examples: Sequence[Example], loads: list[int]) -> list[list[Example]]:
    """Each rank's part of a task. `loads`: the ranks' work in the tasks before, to which this one
    is added. It depends on nothing else, so that all ranks, and those of a resumed run, agree."""
    # Sorted by prompt, so that shared beginnings stay together: their prefill is done once.
    ordered = sorted(examples, key=lambda example: example.prompt)
    # About what it takes to read each prompt and decode the longest answer, in characters.
    works = [len(e.prompt) + CHARACTERS_PER_NEW_TOKEN * e.max_new_tokens for e in ordered]
    world, total, before = len(loads), sum(works), 0
    # The sorted row is cut into as many pieces of equal work as there are ranks. An example belongs
    # to the piece in which its middle lies (in halves, to stay with whole numbers):
    #
    #     work    |---a---|-b-|------c------|--d--|
    #     pieces  |       0       |       1       |      all of c is in 1
    pieces: list[list[Example]] = [[] for _ in loads]
    sizes = [0] * world
    for example, work in zip(ordered, works, strict=True):
        place = (2 * before + work) * world // (2 * total)
        pieces[place].append(example)
        sizes[place] += work
        before += work
    parts: list[list[Example]] = [[] for _ in loads]
    # The largest first, each to the rank with the least work. Without that the same ranks would
    # have one example more than the others in every task.
    for place in sorted(range(world), key=lambda place: sizes[place], reverse=True):
        lightest = loads.index(min(loads))
        parts[lightest] += pieces[place]
        loads[lightest] += sizes[place]
    return parts


def read_predictions(work: Path, suite: str, place: str) -> dict[Key, Row]:
    """The rows of all ranks, from this attempt and earlier ones."""
    rows = {}
    for path in sorted(work.glob(f"{suite}-*.jsonl")):
        for number, row in files.read_lines(path, place):
            if row is None:
                say(f"left out {path}, line {number}: it is damaged")
            else:
                rows[row["task"], row["length"], row["index"]] = row
    return rows


def refuse_another_dtype(work: Path, rows: Iterable[Row], dtype: str) -> None:
    """`auto` is another number format on a GPU than on a CPU, and near ties fall otherwise in it:
    what was begun in one must not end in the other."""
    if others := {row.get(DTYPE, dtype) for row in rows} - {dtype}:
        problem = f"{work} has answers in {others.pop()}, and this device would go on in {dtype}"
        raise UserError(f"{problem}. Go on where it began, or delete that folder to begin anew.")


def read_merged(folder: Path) -> dict[Key, Row]:
    """The rows of predictions.jsonl. What was scored last has a checksum in scores.json."""
    path, scores = folder / PREDICTIONS, folder / SCORES
    checksum = read_json_object(scores).get(CHECKSUM) if scores.is_file() else None
    if checksum is None or checksum == hash_file(path):
        with suppress(KeyError, TypeError):
            rows = read_rows(path)
            return {(row["task"], row["length"], row["index"]): row for row in rows}
    raise DamagedArtifactError(f"{path} is damaged. Delete it; the predictions are made again.")


def until_stop(text: str, stops: Sequence[str]) -> str:
    """A prediction up to where it was to end: generation ends with the whole token in which that
    is. (No version of a suite was raised for it: tokens hardly have a line break and a word.)"""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)]


def score(evaluation: Evaluation, run: SuiteRun, folder: Path) -> None:
    """Write predictions.jsonl, ordered by task and example and with scores, and scores.json."""
    path = folder / run.name / PREDICTIONS
    # A kill may have come after the rows were merged and before scores.json was written.
    predictions = read_merged(path.parent) if path.is_file() else {}
    predictions |= read_predictions(folder / WORK, run.name, evaluation.place)
    left_out: list[str] = []
    rows, scored, floors = [], [], []
    for task, examples in all_examples(evaluation, run, left_out):
        for example in examples:
            key = (task.name, task.length, example.index)
            if (row := predictions.get(key)) is None:
                raise DamagedArtifactError(
                    f"{path} lacks {key}. Delete it; the missing predictions are made again."
                )
            answer = until_stop(row["prediction"], example.stop.strings)
            scores = run.suite.score(run.settings, task, example, answer)
            # What was asked and what is right, so that two evaluations can be paired.
            asked = fingerprint([example.prompt, example.answers])
            rows.append(row | {"scores": scores, EXAMPLE: asked})
            light = replace(example, prompt="")  # all prompts together are gigabytes
            scored.append(Scored(task, light, scores))
            if evaluation.window_tokens is not None and hasattr(run.suite, "floor"):
                share = run.suite.floor(example, evaluation.window_tokens)
                if share is not None:
                    floors.append(Scored(task, light, dict.fromkeys(scores, share)))
    write_rows(path, rows)

    # None: of an earlier version, which did not write it.
    dtype = next((row[DTYPE] for row in rows if DTYPE in row), None)
    results = summarize(run.suite, run.settings, scored)
    content = {
        "suite": run.name,
        "settings": plain(run.settings),
        "limit": run.limit,
        "left_out": left_out,
        "rows": make_rows(evaluation.label, run.name, results, dtype),
        CHECKSUM: hash_file(path),
    }
    if floors:
        results = summarize(run.suite, run.settings, floors)
        # By every metric the floor is the same number, so one is enough.
        metric = getattr(run.suite, "METRIC", None)
        results = [result for result in results if metric in (None, result.metric)]
        found = make_rows(evaluation.label, run.name, results, dtype)
        content["floor"] = {"window_tokens": evaluation.window_tokens, "rows": found}
    write_scores(folder / run.name, content)


def load_examples(
    run: SuiteRun, task: Task, tokenizer: PreTrainedTokenizerBase, tokenizer_hash: str, folder: Path
) -> list[Example]:
    """The first examples of a task, read from `folder` or built and saved there by one process,
    while others wait. LeftOutError if the task cannot be built under these settings."""
    facts = describe_examples(run, task, tokenizer_hash)
    shared = folder / f"examples-{fingerprint(facts)[:16]}"
    if (path := find_file(shared, run.limit)) is None:
        with FolderLock(shared, say, wait=True):
            # Another process may have built it meanwhile.
            if (path := find_file(shared, run.limit)) is None:
                examples = run.suite.build_examples(run.settings, task, tokenizer, run.limit)
                path = write_examples(shared, examples, run.limit, facts)
    # The seal is written after its rows, so rows without one are of a process that was killed.
    seal = path.with_suffix(".json")
    made_from = read_sealed_json(seal, "xxh3", *facts)
    is_of_task = {name: made_from[name] for name in facts} == plain(facts)
    if not path.is_file() or not is_of_task or hash_file(path) != made_from["xxh3"]:
        raise DamagedArtifactError(
            f"{path} is damaged: not what {seal.name} says. Delete both; they are built again."
        )
    return [Example.from_row(row) for row in read_rows(path)[: run.limit]]


def describe_examples(run: SuiteRun, task: Task, tokenizer_hash: str) -> dict[str, Any]:
    facts = {"version": EXAMPLES_VERSION, "suite": run.name, "task": task.name}
    facts |= {"length": task.length, "sources": run.suite.sources(run.settings, task)}
    return facts | {"tokenizer": tokenizer_hash} | run.version_facts


def find_file(folder: Path, limit: int | None) -> Path | None:
    """The smallest file with enough examples."""
    # Examples of one task come in a fixed order, so the first ones of a longer file are the same.
    for seal in sorted(folder.glob("first-*.json")):  # by their numbers, `all` last
        number = seal.stem.removeprefix("first-")
        if number == "all" or (limit is not None and int(number) >= limit):
            return seal.with_suffix(".jsonl")
    return None


def write_examples(
    folder: Path, examples: list[Example], limit: int | None, facts: dict[str, Any]
) -> Path:
    path = folder / f"first-{'all' if limit is None else f'{limit:05}'}.jsonl"
    write_rows(path, [asdict(example) for example in examples])
    seal = facts | {"examples": len(examples), "xxh3": hash_file(path)}
    files.write_sealed_json(path.with_suffix(".json"), seal)
    return path
