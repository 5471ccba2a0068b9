"""Needle-in-a-haystack (NIAH) tasks, built and scored as in RULER.

    bosch niah build --task niah_single_2 --length 4096 --samples 500 --seed 42 \
        --tokenizer FOLDER --essays PaulGrahamEssays.json --out niah_single_2.jsonl

With a real essay file the rows equal RULER's; with `--essays toy` everything comes from the
embedded toy world, in sizes for the tiny model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from bosch.command_line import run_subcommand
from bosch.data import needles
from bosch.data.essays import Essays, make_essays, read_essays
from bosch.data.key_words import wonderwords_keys
from bosch.data.needles import Material, NeedleTask, Sizes
from bosch.data.toy_world.world import ToyEssays, World
from bosch.eval.metrics import string_match_all, string_match_part
from bosch.eval.rows import from_hub, write_rows
from bosch.eval.suites._interface import (
    Example,
    LeftOutError,
    Request,
    Result,
    Scored,
    Stop,
    Task,
    average,
    by_task,
    result_of,
)
from bosch.eval.suites._reporting import AVERAGE, ReportedScore, Row, mean_over_lengths
from bosch.model import load_tokenizer
from bosch.plugins import suggest
from bosch.run.errors import MissingFileError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOY = "toy"
PAPER_LENGTHS = (4096, 8192, 16384, 32768)
TOY_LENGTHS = (512, 1024, 2048)
# The paper's two groups. Tasks in neither count in no average.
GROUPS = {"single": needles.PAPER_TASKS[:3], "multikey": needles.PAPER_TASKS[3:]}
METRIC = "string_match_all"
COMPARED_WITH_CALIBRATION = True


@dataclass(frozen=True)
class Settings:
    essays: str = TOY  # toy, a JSON or text file, a folder of .txt files, or a hub id
    punkt: Path | None = None  # folder of the English Punkt data, for essays that need it
    tasks: tuple[str, ...] = needles.PAPER_TASKS
    lengths: tuple[int, ...] = ()  # tokens with the answer; none: the paper's, or the toy's
    samples: int = 500  # for each task and length
    seed: int = needles.DEFAULT_SEED

    def __post_init__(self) -> None:
        for name in self.tasks:
            needle_task(name)
        if min(self.lengths, default=1) < 1:
            raise UserError(f"NIAH lengths must be 1 token or more: {self.lengths}.")
        if self.samples < 1:
            raise UserError(f"NIAH needs at least 1 sample, not {self.samples}.")


def configure(request: Request) -> tuple[Settings, int]:
    config = request.config
    settings = Settings(
        essays=config.niah_essays or request.essays or TOY,
        punkt=Path(request.punkt) if request.punkt else None,
        tasks=config.niah_tasks or needles.PAPER_TASKS,
        lengths=config.niah_lengths,
        samples=max(Settings.samples, config.niah_samples),
    )
    return settings, config.niah_samples


def check(settings: Settings, positions: int) -> None:
    """Refuse texts longer than the model can read."""
    if (longest := max(settings.lengths, default=0)) > positions:
        raise UserError(
            f"--niah-lengths {longest}: the model reads at most {positions:,} tokens, and NIAH "
            "texts are not truncated. Use smaller lengths, or stretch the positions with --yarn."
        )
    for length in {task.length for task in list_tasks(settings)}:
        kinds = map(needle_task, settings.tasks)
        least = min(needles.least_tokens(k, length, gather(settings, k)) for k in kinds)
        if length < least:
            raise UserError(
                f"--niah-lengths {length}: no task can be built in so few tokens; the shortest "
                f"takes {least:,} or more, including the answer. Use a greater length."
            )


def files(settings: Settings) -> dict[str, str]:
    return {} if settings.essays == TOY else {"essays": settings.essays}


def list_tasks(settings: Settings) -> list[Task]:
    lengths = settings.lengths or (TOY_LENGTHS if settings.essays == TOY else PAPER_LENGTHS)
    return [Task(name, length) for length in lengths for name in settings.tasks]


def sources(settings: Settings, task: Task) -> dict[str, str]:
    material = gather(settings, needle_task(task.name))
    return material.facts | {"samples": str(settings.samples), "seed": str(settings.seed)}


def build_examples(
    settings: Settings, task: Task, tokenizer: "PreTrainedTokenizerBase", limit: int | None = None
) -> list[Example]:
    """The first samples of RULER's file. Each fits into `task.length` tokens with its answer."""
    examples, material = build(settings, task, tokenizer, limit)
    return [
        Example(
            index,
            example.prompt,
            example.outputs,
            material.sizes.answer_tokens,
            Stop(when_answered=True),
            {
                "length": example.length,
                "essays": material.facts["essays"],
                "needle_distances": needles.needle_distances(example, tokenizer)
                if getattr(tokenizer, "is_fast", False)
                else None,
            },
        )
        for index, example in enumerate(examples)
    ]


def score(settings: Settings, task: Task, example: Example, prediction: str) -> dict[str, float]:
    return {
        "string_match_all": string_match_all(prediction, example.answers),
        "string_match_part": string_match_part(prediction, example.answers),
    }


def summarize(settings: Settings, scored: Sequence[Scored]) -> list[Result]:
    """Each task, the paper's two groups at each length, and the average of these group means.

    A group is the mean of its tasks that were evaluated, because niah_multikey_3 does not fit the
    toy's shortest lengths. The average needs both groups at every length.
    """
    tasks = [
        result_of(task, metric, items, percent)
        for task, items in by_task(scored).items()
        for metric in ("string_match_all", "string_match_part")
    ]
    counted = [result for result in tasks if result.metric == METRIC]
    groups, complete = [], True
    for length in sorted({task.length for task in list_tasks(settings)}):
        for name, members in GROUPS.items():
            parts = [r for r in counted if r.length == length and r.task in members]
            complete = complete and bool(parts)
            if parts:
                groups.append(average(name, METRIC, parts, length))
    averages = [average("average", METRIC, groups)] if complete and groups else []
    return tasks + groups + averages


def percent(scores: list[float]) -> float:
    return round(sum(scores) / len(scores) * 100, 2)  # RULER's order of operations


def floor(example: Example, window_tokens: int) -> float | None:
    """The score of a model that sees only the last `window_tokens` tokens and finds every needle in
    them: the share of needles that lie entirely inside. None: unknown, because the tokenizer gives
    no character offsets."""
    distances = example.facts["needle_distances"]
    if not distances:
        return None
    return sum(distance <= window_tokens for distance in distances) / len(distances)


def gather(settings: Settings, task: NeedleTask) -> Material:
    source = settings.essays
    if source == TOY:
        toy_words = World("test", settings.seed).key_words
        facts = {"essays": TOY, "words": "toy world"}
        facts["toy_words_sha256"] = sha256(" ".join(toy_words).encode()).hexdigest()
        return Material(ToyEssays("test", settings.seed), toy_words, needles.TOY_SIZES, facts)
    words = wonderwords_keys()
    if task.haystack != "essay":
        return Material(None, words, Sizes(), {"essays": task.haystack, "words": words.name})
    essays = load_essays(source, settings.punkt)
    facts = {"essays": essays.name, "words": words.name, "essays_sha256": essays.sha256}
    return Material(essays, words, Sizes(), facts)


@lru_cache(maxsize=2)
def load_essays(source: str, punkt: Path | None) -> Essays:
    """From a path, or from the hub. Texts from the hub are joined with blanks, as lm-eval does with
    baber/paul_graham_essays; RULER's own essay file is a different text."""
    if Path(source).exists():
        return read_essays(Path(source), punkt)
    forms = "a JSON file with a field `text`, a folder of .txt files, a hub id, or toy"
    with from_hub(source, "essays", forms):
        from datasets import load_dataset

        texts = load_dataset(source, split="train")["text"]
    return make_essays(" ".join(texts), name=f"{source} (not RULER's text)", punkt=punkt)


def needle_task(name: str) -> NeedleTask:
    names = tuple(needles.TASKS)
    if name not in names:
        raise UserError(f"{name!r} is not a NIAH task: {suggest(name, names)}")
    return needles.TASKS[name]


def build(
    settings: Settings, task: Task, tokenizer: "PreTrainedTokenizerBase", limit: int | None
) -> tuple[list[needles.NeedleExample], Material]:
    kind = needle_task(task.name)
    material = gather(settings, kind)
    num_samples = settings.samples if limit is None else min(limit, settings.samples)
    try:
        examples = needles.build_examples(
            kind, task.length, num_samples, settings.seed, tokenizer, material
        )
    except needles.DoesNotFitError as error:
        raise LeftOutError(str(error)) from error
    return examples, material


# -------------------------------------------------------------------------------------- reports

title = "NIAH"
report_order = 1
tasks_by_length = tuple(GROUPS)  # as the paper's tables 7, 9, 11, 13 and 15 have it


def headline_metric(task: str) -> str:
    return METRIC


def reported_scores(rows: Sequence[Row]) -> list[ReportedScore]:
    """The paper's average, over the groups at each length, and each task over its lengths."""
    lengths: dict[str, list[int]] = {}
    for row in rows:
        if row["metric"] == METRIC and row["length"] and row["task"] not in GROUPS:
            known = lengths.setdefault(row["task"], [])
            if row["length"] not in known:
                known.append(row["length"])
    if not lengths:
        return []
    groups = [
        [(task, length) for task in members if length in lengths.get(task, [])]
        for members in GROUPS.values()
        for length in sorted({length for found in lengths.values() for length in found})
    ]
    groups = [group for group in groups if group]
    weights = {cell: 1 / len(group) / len(groups) for group in groups for cell in group}
    paper = [name for members in GROUPS.values() for name in members]  # other tasks come after them
    tasks = sorted(lengths, key=lambda n: (paper.index(n) if n in paper else len(paper), n))
    parts = [mean_over_lengths("niah", task, lengths[task]) for task in tasks]
    return [ReportedScore("niah", AVERAGE, "average", weights, written_by_suite=True), *parts]


@dataclass(frozen=True)
class Build:
    """Write the examples of one task and length in RULER's format."""

    task: str  # niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery
    length: int  # tokens of prompt and answer together
    tokenizer: Path  # folder of a model or tokenizer
    essays: str  # a JSON or text file, a folder of .txt files, a hub id, or toy
    out: Path  # JSONL: index, input, answer_prefix, outputs, length
    samples: int = 500
    seed: int = needles.DEFAULT_SEED
    punkt: Path | None = None  # folder of the English Punkt data, for essays that need it


def main(args: Sequence[str] | None = None) -> None:
    run_subcommand("python -m bosch.eval.suites.niah", {"build": (Build, run_build)}, args)


def run_build(command: Build) -> None:
    task = Task(command.task, command.length)
    settings = Settings(
        command.essays,
        command.punkt,
        (command.task,),
        (command.length,),
        command.samples,
        command.seed,
    )
    if not command.tokenizer.is_dir():
        raise MissingFileError(
            f"{command.tokenizer} is not a folder; --tokenizer names that of a model or tokenizer."
        )
    examples, material = build(settings, task, load_tokenizer(command.tokenizer), None)
    # A text from the hub is not RULER's, so its rows name it.
    is_local = command.essays == TOY or Path(command.essays).exists() or material.essays is None
    note = {} if is_local else {"essays": material.facts["essays"]}
    write_rows(command.out, [e.to_row(i) | note for i, e in enumerate(examples)])
    print(
        f"wrote {command.out}: {len(examples)} examples of {command.task} in {command.length} "
        f"tokens, haystack: {material.facts['essays']}, keys: {material.facts['words']}"
    )


if __name__ == "__main__":
    main()
