"""GSM8K as lm-eval asks and judges it: `gsm8k_cot` with eight fixed shots, `gsm8k` with five drawn.

    python -m eval.suites.gsm8k score --in rows.jsonl --out scored.jsonl

The command scores predictions made anywhere: rows {task, prediction, answer}, where `answer` is the
data set's own field and `prediction` the raw generation, get `strict` and `flexible`, each 0 or 1.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import tyro

from bosch.plugins import suggest
from bosch.run.errors import exit_on_user_error
from eval.rows import Row, parse_parquet, parse_rows, read_rows, require_text, write_rows
from eval.suites._interface import Example, Result, Scored, Stop, Task, by_task, result_of

HUB_ID = "openai/gsm8k"
HUB_ID_PATTERN = re.compile(r"[\w.-]+/[\w.-]+")
NUM_ROWS = {"train": 7473, "test": 1319}
NUM_SHOTS = 5  # of `gsm8k`; `gsm8k_cot` has its own eight
SHOTS_SEED = 1234
MAX_NEW_TOKENS = 256
COT = Task("gsm8k_cot")
HEADLINE = "exact_match_flexible"  # what the average over categories counts
SHOTS_FILE = Path(__file__).parents[1] / "data" / "gsm8k_cot_shots.json"

# The last full stop in the pattern of gsm8k_cot is any character of the line, as upstream: an
# output that ends in "The answer is 72" gives 7.
STRICT = {
    "gsm8k": re.compile(r"#### (\-?[0-9\.\,]+)"),
    "gsm8k_cot": re.compile(r"The answer is (\-?[0-9\.\,]+)."),
}
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
STOP_STRINGS = {
    "gsm8k": ("Question:", "</s>", "<|im_end|>"),
    "gsm8k_cot": ("Q:", "</s>", "<|im_end|>"),
}
NOTHING_FOUND = "[invalid]"
IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")  # deleted on both sides, in this order


@dataclass(frozen=True)
class Settings:
    data: str = HUB_ID  # a hub id, a folder with train and test, or a file of test rows
    tasks: tuple[str, ...] = (COT.name,)

    def __post_init__(self) -> None:
        for name in self.tasks:
            check_task(name)


def check_task(name: str) -> None:
    if name not in STRICT:
        raise ValueError(f"{name!r} is not one of the tasks: {suggest(name, tuple(STRICT))}")


def list_tasks(settings: Settings) -> list[Task]:
    return [Task(name) for name in settings.tasks]


def sources(settings: Settings, task: Task) -> dict[str, str]:
    """Hashes of the rows, whatever file they came in."""
    splits = ("test",) if task == COT else ("train", "test")
    return {f"{split}_sha256": hash_rows(read_split(settings.data, split)) for split in splits}


def build_examples(
    settings: Settings, task: Task, tokenizer: Any, limit: int | None = None
) -> list[Example]:
    rows = read_split(settings.data, "test")[:limit]
    write_prompt = cot_prompts() if task == COT else drawn_prompts(settings.data)
    return [
        Example(
            index,
            write_prompt(row["question"]),
            (row["answer"],),
            MAX_NEW_TOKENS,
            Stop(strings=STOP_STRINGS[task.name]),
        )
        for index, row in enumerate(rows)
    ]


def cot_prompts() -> Callable[[str], str]:
    """The writer of prompts with the eight chain-of-thought shots."""
    shots = "".join(f"Q: {shot['question']}\nA: {shot['target']}\n\n" for shot in cot_shots())
    return lambda question: f"{shots}Q: {question}\nA:"


@cache
def cot_shots() -> list[dict[str, str]]:
    return json.loads(SHOTS_FILE.read_text(encoding="utf-8"))["shots"]


def drawn_prompts(source: str) -> Callable[[str], str]:
    """The writer of prompts with shots from train, drawn anew for each prompt from one generator:
    to equal upstream's they must be written in the order of the test rows, from the first on."""
    train = read_split(source, "train")
    rng = random.Random(SHOTS_SEED)

    def write(question: str) -> str:
        shots = rng.sample(train, NUM_SHOTS)
        texts = [f"Question: {shot['question']}\nAnswer: {shot['answer']}" for shot in shots]
        return "\n\n".join([*texts, f"Question: {question}\nAnswer:"])

    return write


def score(settings: Settings, task: Task, example: Example, prediction: str) -> dict[str, float]:
    strict, flexible = judge(task.name, prediction, example.answers[0])
    return {"exact_match_strict": strict, "exact_match_flexible": flexible}


def judge(task: str, prediction: str, answer: str) -> tuple[float, float]:
    """(strict, flexible): whether the number that each filter finds is the answer's, 1 or 0."""
    text = cut_at_stop(prediction, STOP_STRINGS[task])
    # lm-eval's gsm8k_cot compares with the answer's end, gsm8k with all of it, which IGNORED cuts.
    gold = answer.split("####")[-1].strip() if task == COT.name else answer
    found = (find_strict(task, text), find_flexible(text))
    strict, flexible = (float(normalize(number) == normalize(gold)) for number in found)
    return strict, flexible


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> str:
    for stop in stop_strings:
        text = text.split(stop)[0]
    return text


def find_strict(task: str, text: str) -> str:
    """The first number in the form of the shots."""
    match = STRICT[task].search(text)
    return match[1] if match else NOTHING_FOUND


def find_flexible(text: str) -> str:
    """The last thing that looks like a number."""
    matches = FLEXIBLE.findall(text)
    return matches[-1][0] or matches[-1][1] if matches else NOTHING_FOUND


def normalize(number: str) -> str:
    for pattern in IGNORED:
        number = re.sub(pattern, "", number)
    return number.lower()


def summarize(settings: Settings, scored: Sequence[Scored]) -> list[Result]:
    return [
        result_of(task, metric, items, percent)
        for task, items in by_task(scored).items()
        for metric in ("exact_match_strict", "exact_match_flexible")
    ]


def percent(scores: list[float]) -> float:
    return 100 * sum(scores) / len(scores)


@lru_cache(maxsize=4)
def read_split(source: str, split: str) -> list[Row]:
    """The rows of `train` or `test`, checked."""
    rows, where = load_split(source, split)
    for number, row in enumerate(rows, 1):
        for field in ("question", "answer"):
            require_text(row, field, f"{where}, row {number}")
    if len(rows) != NUM_ROWS[split]:
        raise ValueError(
            f"{where} has {len(rows)} rows, but GSM8K's {split} has {NUM_ROWS[split]}; "
            "get the whole set (--limit takes its first rows)."
        )
    return rows


def load_split(source: str, split: str) -> tuple[list[Row], str]:
    path = Path(source)
    if path.is_dir():
        path = find_split(path, split)
    elif path.is_file() and split != "test":
        raise ValueError(
            f"{path} is one file, the test rows; the task gsm8k draws its shots from train. Name "
            "a folder with train.jsonl and test.jsonl, or ask for gsm8k_cot."
        )
    elif not path.is_file() and HUB_ID_PATTERN.fullmatch(source):
        return download_split(source, split), f"{source}, {split}"
    elif not path.is_file():
        raise FileNotFoundError(
            f"{source}: no GSM8K there. Name a folder with train.jsonl and test.jsonl, a file of "
            f"test rows, or a hub id such as {HUB_ID}."
        )
    if path.suffix == ".parquet":
        return parse_parquet(path.read_bytes(), str(path)), str(path)
    return parse_rows(path.read_bytes(), str(path), gzipped=path.suffix == ".gz"), str(path)


def find_split(folder: Path, split: str) -> Path:
    patterns = (f"{split}.jsonl", f"{split}.jsonl.gz", f"{split}*.parquet")
    files = [
        file
        for place in (folder, folder / "main")
        for pattern in patterns
        for file in sorted(place.glob(pattern))
    ]
    if len(files) != 1:
        found = ", ".join(map(str, files)) or "nothing"
        raise FileNotFoundError(
            f"{folder}: GSM8K's {split} must be one file, {split}.jsonl, .jsonl.gz or .parquet; "
            f"found {found}."
        )
    return files[0]


def download_split(hub_id: str, split: str) -> list[Row]:
    from datasets import load_dataset

    try:
        return load_dataset(hub_id, "main", split=split).to_list()
    except Exception as error:  # whatever a hub, a cache or a network can answer
        raise FileNotFoundError(
            f"{hub_id}: no such file or folder, and nothing from the hub either "
            f"({type(error).__name__}). Name a folder with train.jsonl and test.jsonl."
        ) from error


def hash_rows(rows: Sequence[Row]) -> str:
    text = json.dumps([[row["question"], row["answer"]] for row in rows])
    return sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Score:
    """Score rows {task, prediction, answer}: each gets `strict` and `flexible`, 0 or 1."""

    in_file: Annotated[Path, tyro.conf.arg(name="in")]  # JSONL
    out: Path  # JSONL: the same rows, each with its two scores
    debug: bool = False  # show tracebacks


def main(args: list[str] | None = None) -> None:
    command: Score = tyro.extras.subcommand_cli_from_dict(
        {"score": Score}, prog="python -m eval.suites.gsm8k", args=args
    )
    exit_on_user_error(lambda: run_score(command), command.debug)


def run_score(command: Score) -> None:
    rows = read_rows(command.in_file)
    scored = [
        row | score_row(row, f"{command.in_file}, row {number}")
        for number, row in enumerate(rows, 1)
    ]
    write_rows(command.out, scored)
    for task in STRICT:
        mine = [row for row in scored if row["task"] == task]
        if mine:
            strict, flexible = (percent([row[m] for row in mine]) for m in ("strict", "flexible"))
            print(f"{task:12} strict {strict:6.2f}  flexible {flexible:6.2f}  n={len(mine)}")
    print(f"wrote {command.out}: {len(scored)} rows")


def score_row(row: Row, where: str) -> dict[str, float]:
    task = require_text(row, "task", where)
    if task not in STRICT:
        raise ValueError(f"{where}: {task!r} is not one of the tasks: {', '.join(STRICT)}")
    prediction = require_text(row, "prediction", where)
    strict, flexible = judge(task, prediction, require_text(row, "answer", where))
    return {"strict": strict, "flexible": flexible}


if __name__ == "__main__":
    main()
