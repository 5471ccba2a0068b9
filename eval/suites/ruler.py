"""RULER's 13 tasks, built and scored as there: the eight needle tasks of the suite `niah`, variable
tracking, common words, frequent coded words, and questions on documents.

    bosch ruler build --task vt --length 4096 --samples 500 --seed 42 --tokenizer FOLDER --out FILE

The questions need files: `--squad dev-v2.0.json`, `--hotpot hotpot_dev_distractor_v1.json`, in
`bosch recover` `--eval.options ruler.squad=FILE ruler.hotpot=FILE`. Without one its task is left
out; then there is no average: RULER's is the plain mean of all 13.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bosch.command_line import run_subcommand
from bosch.config import at_least
from bosch.data import needle_text, needles, ruler
from bosch.data.key_words import wonderwords_keys
from bosch.data.needles import token_counter
from bosch.eval.averages import AVERAGE, weights_of
from bosch.eval.metrics import string_match_all, string_match_part
from bosch.eval.rows import write_rows
from bosch.eval.suites import niah
from bosch.eval.suites._common import Tokenizer, check_names
from bosch.eval.suites._interface import Average, Cell, Example, Request, Stop, Task
from bosch.eval.suites._reporting import ReportedScore, Row, over_lengths
from bosch.run.errors import UserError, run_main
from bosch.run.fingerprint import hash_file

TASKS = (*needles.TASKS, *ruler.TASKS)  # in RULER's order
METRIC = "ruler"  # of every task the one that RULER counts
FILES = {"qa_1": "squad", "qa_2": "hotpot"}
COMPARED_WITH_CALIBRATION = True
percent = niah.percent


@dataclass(frozen=True)
class Settings:
    essays: str | None = None  # as in the suite niah, but not toy
    punkt: Path | None = None  # folder of the English Punkt data, for essays that need it
    squad: Path | None = None  # dev-v2.0.json; None: qa_1 is left out
    hotpot: Path | None = None  # hotpot_dev_distractor_v1.json; None: qa_2 is left out
    english_words: Path | None = None  # english_words.json, for cwe of more words than usual
    tasks: tuple[str, ...] = TASKS
    lengths: tuple[int, ...] = (4_096, 8_192, 16_384, 32_768)  # tokens with the answer
    samples: int = 500  # for each task and length
    seed: int = needles.DEFAULT_SEED

    def __post_init__(self) -> None:
        check_names(self.tasks, TASKS, "a RULER task")
        at_least(1, self, "ruler", "samples")

    @property
    def needle(self) -> niah.Settings:
        count, seed = self.samples, self.seed
        return niah.Settings(self.essays or "", self.punkt, (), self.lengths, count, seed)


def configure(request: Request) -> tuple[Settings, int]:
    config = request.config
    essays = config.niah_essays or request.essays
    settings = Settings(
        essays=None if essays == niah.TOY else essays,
        punkt=Path(request.punkt) if request.punkt else None,
        lengths=config.niah_lengths or Settings.lengths,
        samples=max(Settings.samples, config.niah_samples),
    )
    return settings, config.niah_samples


def check(settings: Settings, positions: int) -> None:
    for task in list_tasks(settings):
        check_essays(settings, task)


def check_essays(settings: Settings, task: Task) -> None:
    is_in_essays = task.name in needles.TASKS and needles.TASKS[task.name].haystack == "essay"
    if is_in_essays and settings.essays is None:
        raise UserError(
            "suite ruler hides its needles in essays; name them: --eval.niah-essays, --niah-essays."
        )


def describe(settings: Settings) -> str:
    names = dict.fromkeys(task.name for task in list_tasks(settings))
    said = f"RULER: {len(names)} of {len(TASKS)} tasks"
    files = [FILES[name] for name in settings.tasks if name in FILES and name not in names]
    if files:
        said += f", without those that need {' and '.join(f'ruler.{name}' for name in files)}"
    if len(names) < len(TASKS):
        said += "; the average is of all, so there is none"
    if needle_text.is_text(settings.essays or ""):
        said += f"; needles in {settings.essays}, so the texts are not RULER's"
    return said


def files(settings: Settings) -> dict[str, str]:
    names = ("essays", "english_words", *FILES.values())
    return {name: str(path) for name in names if (path := getattr(settings, name))}


def hashes(settings: Settings) -> dict[str, str | None]:
    return niah.hashes(settings.needle)


def list_tasks(settings: Settings) -> list[Task]:
    without = [name for name, file in FILES.items() if getattr(settings, file) is None]
    names = [name for name in settings.tasks if name not in without]
    return [Task(name, length) for length in settings.lengths for name in names]


def sources(settings: Settings, task: Task) -> dict[str, str]:
    if task.name in needles.TASKS:
        check_essays(settings, task)
        return niah.sources(settings.needle, task)
    facts = {"samples": str(settings.samples), "seed": str(settings.seed)}
    if task.name == "cwe":
        facts["words"] = wonderwords_keys().name
        if settings.english_words is not None:
            facts["english_words"] = hash_file(settings.english_words)
    if task.name in FILES:
        path = getattr(settings, FILES[task.name])
        facts["questions"] = hash_file(ruler.need(f"--{FILES[task.name]}", path, task.name))
    return facts


def build_examples(
    settings: Settings, task: Task, tokenizer: Tokenizer, limit: int | None = None
) -> list[Example]:
    if task.name in needles.TASKS:
        return niah.build_examples(settings.needle, task, tokenizer, limit)
    budget, stop = ruler.TEMPLATES[task.name]["answer_tokens"], Stop(when_answered=True)
    examples = []
    for index, one in enumerate(build(settings, task, tokenizer, limit)):
        # Tokens from the start of each source to the prompt's end; None: unknown, or all over it.
        # The fixed shuffles put the gold documents of all samples of one size in the same places.
        distances = None
        if one.sources and getattr(tokenizer, "is_fast", False):
            distances = needles.distances_to_end(one.prompt, one.sources, tokenizer)
        facts = {"length": one.length, "distances": distances}
        examples.append(Example(index, one.prompt, one.outputs, budget, stop, facts))
    return examples


def build(
    settings: Settings, task: Task, tokenizer: Tokenizer, limit: int | None
) -> list[ruler.RulerExample]:
    given = ruler.Files(settings.squad, settings.hotpot, settings.english_words)
    num_samples, count = len(range(settings.samples)[:limit]), token_counter(tokenizer)
    return ruler.build_examples(task.name, task.length, num_samples, settings.seed, count, given)


def score(settings: Settings, task: Task, example: Example, prediction: str) -> dict[str, float]:
    """All answers count in equal parts; of questions one is enough."""
    is_part = task.name in ruler.TEMPLATES and ruler.TEMPLATES[task.name]["metric"] == "part"
    match = string_match_part if is_part else string_match_all
    return {METRIC: match(prediction, example.answers)}


def averages(settings: Settings, cells: Sequence[Cell]) -> list[Average]:
    """At each length where all 13 tasks were evaluated their mean, and the mean of these if that is
    every length."""
    by_length = [
        Average(AVERAGE, parts, length)
        for length in settings.lengths
        if len(parts := [cell for cell in cells if cell[1] == length]) == len(TASKS)
    ]
    # Over some lengths only, the average would be another score of the same name.
    if not by_length or len(by_length) < len(settings.lengths):
        return by_length
    return [*by_length, Average(AVERAGE, [(AVERAGE, length) for length in settings.lengths])]


def floor(example: Example, window_tokens: int) -> float | None:
    """The score of a model that sees only the end of the prompt: of needles and chains the share in
    it, of questions 1 if a document with the answer is."""
    if "needle_distances" in example.facts:
        return niah.floor(example, window_tokens)
    if not (found := example.facts["distances"]):
        return None
    inside = [distance <= window_tokens for distance in found]
    # Examples do not carry their task's name; its answers' room is its own.
    is_chain = example.max_new_tokens == ruler.TEMPLATES["vt"]["answer_tokens"]
    return sum(inside) / len(inside) if is_chain else float(any(inside))


title = "RULER"
report_order = 2
tasks_alike = tuple(FILES)


def reported_scores(rows: Sequence[Row]) -> list[ReportedScore]:
    """The average over all lengths, where the suite wrote one, and each task over its lengths."""
    parts = over_lengths("ruler", [row for row in rows if row["task"] in TASKS])
    parts.sort(key=lambda part: TASKS.index(part.name))
    cells = [cell for part in parts for cell in part.weights]
    evaluated = Settings(lengths=tuple(sorted({length for _, length in cells})))
    weights = weights_of(averages(evaluated, cells))
    return [ReportedScore("ruler", AVERAGE, "average", weights, written_by_suite=True), *parts]


@dataclass(frozen=True, kw_only=True)
class Build(niah.Build):
    """Write the examples of one task and length in RULER's format."""

    task: str  # one of the 13: niah_single_1 ... niah_multiquery, vt, cwe, fwe, qa_1, qa_2
    squad: Path | None = None  # for qa_1: dev-v2.0.json
    hotpot: Path | None = None  # for qa_2: hotpot_dev_distractor_v1.json
    english_words: Path | None = None  # for cwe of more words than wonderwords has


def main(args: Sequence[str]) -> None:
    run_subcommand("python -m bosch.eval.suites.ruler", {"build": run_build}, args)


def run_build(command: Build) -> None:
    if command.task in needles.TASKS:
        return niah.run_build(command)
    settings = Settings(
        squad=command.squad,
        hotpot=command.hotpot,
        english_words=command.english_words,
        tasks=(command.task,),
        lengths=(command.length,),
        samples=command.samples,
        seed=command.seed,
    )
    tokenizer, task = niah.open_tokenizer(command.tokenizer), Task(command.task, command.length)
    examples = build(settings, task, tokenizer, None)
    write_rows(command.out, [example.to_row(index) for index, example in enumerate(examples)])
    print(f"wrote {command.out}: {len(examples)} examples of {task.name} in {task.length} tokens")


if __name__ == "__main__":
    run_main(main)
