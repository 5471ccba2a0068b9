"""Needle-in-a-haystack (NIAH) tasks, built and scored as in RULER.

    bosch niah build --task niah_single_2 --length 4096 --samples 500 --seed 42 \
        --tokenizer FOLDER --essays PaulGrahamEssays.json --out niah_single_2.jsonl

With a real essay file the rows equal RULER's; with `--essays toy` everything comes from the
embedded toy world, in sizes for the tiny model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from bosch.command_line import run_subcommand
from bosch.config import TokenCount, at_least
from bosch.data import needle_text, needles
from bosch.data.essays import Essays, make_essays, read_essays
from bosch.data.key_words import wonderwords_keys
from bosch.data.needles import Material, NeedleTask, Sizes
from bosch.data.toy_world.world import ToyEssays, key_words
from bosch.eval.averages import AVERAGE, weights_of
from bosch.eval.metrics import string_match_all, string_match_part
from bosch.eval.rows import load_rows, require, write_rows
from bosch.eval.suites._common import Tokenizer, check_names
from bosch.eval.suites._interface import Average, Cell, Example, Request, Stop, Task
from bosch.eval.suites._reporting import ReportedScore, Row, over_lengths
from bosch.model import load_tokenizer
from bosch.run.errors import MissingFileError, UserError, run_main
from bosch.run.kept import kept

TOY = "toy"
PAPER_LENGTHS = (4096, 8192, 16384, 32768)
TOY_LENGTHS = (512, 1024, 2048)
# The paper's two groups. Tasks in neither count in no average.
GROUPS = {"single": needles.PAPER_TASKS[:3], "multikey": needles.PAPER_TASKS[3:]}
METRIC = "string_match_all"
COMPARED_WITH_CALIBRATION = True


@dataclass(frozen=True)
class Settings:
    # toy, a JSON or text file, a folder of .txt files, a hub id, or text:SOURCE
    essays: str = TOY
    punkt: Path | None = None  # folder of the English Punkt data, for essays that need it
    tasks: tuple[str, ...] = needles.PAPER_TASKS
    lengths: tuple[int, ...] = ()  # tokens with the answer; none: the paper's, or the toy's
    samples: int = 500  # for each task and length
    seed: int = needles.DEFAULT_SEED

    def __post_init__(self) -> None:
        check_names(self.tasks, needles.TASKS, "a NIAH task")
        at_least(1, self, "niah", "samples")
        if min(self.lengths, default=1) < 1:
            raise UserError(f"NIAH lengths must be 1 token or more: {self.lengths}.")


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
    for length in {task.length for task in list_tasks(settings)}:
        kinds = [needles.TASKS[name] for name in settings.tasks]
        least = min(needles.least_tokens(k, length, gather(settings, k)) for k in kinds)
        if length < least:
            problem = f"--niah-lengths {length}: no task can be built in so few tokens"
            raise UserError(f"{problem}; the shortest takes {least:,} or more with its answer.")


def files(settings: Settings) -> dict[str, str]:
    is_file = settings.essays != TOY and not needle_text.is_text(settings.essays)
    return {"essays": settings.essays} if is_file else {}


def hashes(settings: Settings) -> dict[str, str | None]:
    if not needle_text.is_text(settings.essays):
        return {}
    longest = max(settings.lengths or PAPER_LENGTHS)
    return {"essays": needle_text.hash_text(settings.essays, longest)}


def list_tasks(settings: Settings) -> list[Task]:
    lengths = settings.lengths or (TOY_LENGTHS if settings.essays == TOY else PAPER_LENGTHS)
    return [Task(name, length) for length in lengths for name in settings.tasks]


def sources(settings: Settings, task: Task) -> dict[str, str]:
    material = gather(settings, needles.TASKS[task.name])
    return material.facts | {"samples": str(settings.samples), "seed": str(settings.seed)}


def build_examples(
    settings: Settings, task: Task, tokenizer: Tokenizer, limit: int | None = None
) -> list[Example]:
    """The first samples of RULER's file. Each fits into `task.length` tokens with its answer."""
    built, material = build(settings, task, tokenizer, limit)
    examples, stop = [], Stop(when_answered=True)
    name, budget = material.facts["essays"], material.sizes.answer_tokens
    for index, one in enumerate(built):
        # Only fast tokenizers say where in the text a token begins.
        is_fast = getattr(tokenizer, "is_fast", False)
        distances = needles.needle_distances(one, tokenizer) if is_fast else None
        facts = {"length": one.length, "essays": name, "needle_distances": distances}
        examples.append(Example(index, one.prompt, one.outputs, budget, stop, facts))
    return examples


def build(
    settings: Settings, task: Task, tokenizer: Tokenizer, limit: int | None
) -> tuple[list[needles.NeedleExample], Material]:
    kind = needles.TASKS[task.name]
    found, count = gather(settings, kind), len(range(settings.samples)[:limit])
    seed = settings.seed
    return needles.build_examples(kind, task.length, count, seed, tokenizer, found), found


def score(settings: Settings, task: Task, example: Example, prediction: str) -> dict[str, float]:
    metrics = (string_match_all, string_match_part)
    return {metric.__name__: metric(prediction, example.answers) for metric in metrics}


def percent(task: str, scores: Sequence[float]) -> float:
    """In RULER's order of operations, which decides ties of the second digit."""
    return round(sum(scores) / len(scores) * 100, 2)


def averages(settings: Settings, cells: Sequence[Cell]) -> list[Average]:
    """The paper's two groups at each length, and the mean of these. A group is the mean of its
    tasks that were evaluated, because niah_multikey_3 does not fit the toy's shortest lengths. The
    average needs both groups at every length."""
    groups = [
        Average(name, [cell for cell in cells if cell[0] in members and cell[1] == length], length)
        for length in sorted({task.length for task in list_tasks(settings)})
        for name, members in GROUPS.items()
    ]
    found = [group for group in groups if group.parts]
    # Over some lengths only, the average would be another score of the same name.
    if not found or len(found) < len(groups):
        return found
    return [*found, Average(AVERAGE, [(group.name, group.length) for group in found])]


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
        toy_words = key_words("test")
        facts = {"essays": TOY, "words": "toy world"}
        facts["toy_words_sha256"] = sha256(" ".join(toy_words).encode()).hexdigest()
        toy = ToyEssays("test", settings.seed)
        return Material(toy, toy_words, needles.TOY_SIZES, facts, keys_may_repeat=False)
    if needle_text.is_text(source):
        longest = max(settings.lengths or PAPER_LENGTHS)
        return needle_text.gather_text(source, longest, "test", task)
    words = wonderwords_keys()
    if task.haystack != "essay":
        return Material(None, words, Sizes(), {"essays": task.haystack, "words": words.name})
    essays = load_essays(source, settings.punkt)
    facts = {"essays": essays.name, "words": words.name, "essays_sha256": essays.sha256}
    return Material(essays, words, Sizes(), facts)


@kept
def load_essays(source: str, punkt: Path | None) -> Essays:
    """From a path, or from the hub. Texts from the hub are joined with blanks, as lm-eval does with
    baber/paul_graham_essays; RULER's own essay file is a different text."""
    if Path(source).exists():
        return read_essays(Path(source), punkt)
    forms = "a JSON file with a field `text`, a folder of .txt files, a hub id, or toy"
    rows = load_rows(Path(source), "essays", forms, "train")
    for number, row in enumerate(rows, 1):
        require(row, f"{source}, row {number}", str, "text")
    text = " ".join(row["text"] for row in rows)
    return make_essays(text, name=f"{source} (not RULER's text)", punkt=punkt)


title = "NIAH"
report_order = 1
tasks_by_length = tuple(GROUPS)  # as the paper's tables 7, 9, 11, 13 and 15 have it


def reported_scores(rows: Sequence[Row]) -> list[ReportedScore]:
    """The paper's average, over the groups at each length, and each task over its lengths."""
    counted = [row for row in rows if row["metric"] == METRIC and row["length"]]
    paper = [name for members in GROUPS.values() for name in members]  # other tasks come after them
    parts = over_lengths("niah", [row for row in counted if row["task"] not in GROUPS])
    parts.sort(key=lambda p: (paper.index(p.name) if p.name in paper else len(paper), p.name))
    cells = [cell for part in parts for cell in part.weights]
    evaluated = Settings(lengths=tuple(length for _, length in cells))
    weights = weights_of(averages(evaluated, cells))
    average_score = ReportedScore("niah", AVERAGE, "average", weights, written_by_suite=True)
    return [average_score, *parts] if parts else []


@dataclass(frozen=True, kw_only=True)
class Build:
    """Write the examples of one task and length in RULER's format."""

    task: str  # niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery
    length: TokenCount  # tokens of prompt and answer together
    tokenizer: Path  # folder of a model or tokenizer
    out: Path  # JSONL: index, input, answer_prefix, outputs, length
    # A JSON or text file, a folder of .txt files, a hub id, text:SOURCE, or toy; not for tasks
    # without essays.
    essays: str | None = None
    samples: int = 500
    seed: int = needles.DEFAULT_SEED
    punkt: Path | None = None  # folder of the English Punkt data, for essays that need it


def main(args: Sequence[str]) -> None:
    run_subcommand("python -m bosch.eval.suites.niah", {"build": run_build}, args)


def run_build(command: Build) -> None:
    source, names, lengths = command.essays or "", (command.task,), (command.length,)
    settings = Settings(source, command.punkt, names, lengths, command.samples, command.seed)
    if not source and needles.TASKS[command.task].haystack == "essay":
        raise UserError(f"{command.task} hides its needles in essays; name them with --essays.")
    (task,) = list_tasks(settings)
    examples, material = build(settings, task, open_tokenizer(command.tokenizer), None)
    # A text from the hub is not RULER's, so its rows name it.
    name = material.facts["essays"]
    is_local = source == TOY or Path(source).exists() or material.essays is None
    note = {} if is_local else {"essays": name}
    write_rows(command.out, [example.to_row(i) | note for i, example in enumerate(examples)])
    print(
        f"wrote {command.out}: {len(examples)} examples of {task.name} in {task.length} tokens, "
        f"haystack: {name}, keys: {material.facts['words']}"
    )


def open_tokenizer(folder: Path) -> Tokenizer:
    if not folder.is_dir():
        raise MissingFileError(f"--tokenizer {folder} is not a folder with a tokenizer.")
    return load_tokenizer(folder)


if __name__ == "__main__":
    run_main(main)
