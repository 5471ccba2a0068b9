"""LongBench v2: 503 multiple-choice questions on texts of 8,000 to 2,000,000 words.

    bosch evaluate --model DIR --suite longbench_v2 --options longbench_v2.data=data.json

Prompts, extraction and scores are LongBench's; answers are greedy, where it samples at a
temperature of 0.1. A model that was not tuned to chat seldom writes the sentence that is looked
for: `longbench_v2.mode=letter` begins it, and the next token is the answer. Chance is 25, and the
standard error of all questions 2.2.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from bosch.config import at_least
from bosch.eval.averages import AVERAGE
from bosch.eval.rows import Row, load_rows, require
from bosch.eval.suites._common import Tokenizer
from bosch.eval.suites._interface import Average, Cell, Example, Request, Scored, Stop, Task
from bosch.eval.suites._reporting import ReportedScore
from bosch.run.errors import UserError
from bosch.run.kept import kept
from bosch.run.progress import say

HUB_ID = "zai-org/LongBench-v2"
PROMPT_FILE = Path(__file__).parents[1] / "data" / "longbench_v2_prompt.txt"
TASK = Task("longbench_v2")
METRIC = "accuracy"
NUM_ROWS = 503
CHOICES = ("A", "B", "C", "D")
CHOSEN = tuple(f"choice_{letter}" for letter in CHOICES)
FIELDS = ("_id", "difficulty", "length", "question", "answer", "context", *CHOSEN)
BEGIN = "\n\nThe correct answer is ("  # of mode `letter`
# The first that is found counts; also "The correct answer is Apple".
PATTERNS = (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])")
MAX_NEW_TOKENS = 128
MAX_PROMPT_TOKENS = 120_000  # LongBench's, for all models
SLACK = 64  # a prompt without its middle, encoded again, may have a few tokens more


@dataclass(frozen=True)
class Settings:
    data: str = HUB_ID  # data.json, other rows (JSONL, Parquet), or a hub id
    mode: Literal["sentence", "letter"] = "sentence"  # whether the model writes the whole sentence
    max_prompt_tokens: int = MAX_PROMPT_TOKENS  # longer prompts lose their middle

    def __post_init__(self) -> None:
        at_least(2, self, "longbench_v2", "max_prompt_tokens")


def configure(request: Request) -> tuple[Settings, int | None]:
    # Prompt, answer, and the tokens that a seam may add must fit.
    room = request.positions - MAX_NEW_TOKENS - SLACK
    return Settings(max_prompt_tokens=min(MAX_PROMPT_TOKENS, room)), request.config.samples


def files(settings: Settings) -> dict[str, str]:
    return {"data": settings.data}


def list_tasks(settings: Settings) -> list[Task]:
    return [TASK]


def sources(settings: Settings, task: Task) -> dict[str, str]:
    text = json.dumps([[row[name] for name in FIELDS] for row in read_data(settings.data)])
    made = {"mode": settings.mode, "max_prompt_tokens": str(settings.max_prompt_tokens)}
    return made | {"sha256": sha256(text.encode()).hexdigest()}


def describe(settings: Settings) -> str:
    count, most = len(read_data(settings.data)), settings.max_prompt_tokens
    known = "" if count == NUM_ROWS else f" (LongBench v2 has {NUM_ROWS})"
    return f"{count} questions{known}; prompts longer than {most:,} tokens lose their middle"


def build_examples(
    settings: Settings, task: Task, tokenizer: Tokenizer, limit: int | None = None
) -> list[Example]:
    """Of a prompt that is too long the first and last tokens stay, of an odd number one more of the
    last."""
    template, most = PROMPT_FILE.read_text("utf-8"), settings.max_prompt_tokens
    examples, num_cut = [], 0
    for index, row in enumerate(read_data(settings.data)[:limit]):
        prompt = template
        parts = {"$DOC$": row["context"], "$Q$": row["question"]}
        parts |= {f"$C_{letter}$": row[n] for letter, n in zip(CHOICES, CHOSEN, strict=True)}
        for mark, text in parts.items():  # one after another: a text may hold a later mark
            prompt = prompt.replace(mark, text.strip())
        tokens = tokenizer(prompt)["input_ids"]
        if is_cut := len(tokens) > most:
            kept = tokens[: most // 2] + tokens[most // 2 - most :]
            prompt, num_cut = str(tokenizer.decode(kept, skip_special_tokens=True)), num_cut + 1
        facts = {"difficulty": row["difficulty"], "length": row["length"], "is_cut": is_cut}
        begin, budget = (BEGIN, 1) if settings.mode == "letter" else ("", MAX_NEW_TOKENS)
        examples.append(Example(index, prompt + begin, (row["answer"],), budget, Stop(), facts))
    if num_cut:
        say(f"longbench_v2: {num_cut} of {len(examples)} prompts lose their middle")
    return examples


def score(settings: Settings, task: Task, example: Example, prediction: str) -> dict[str, float]:
    """An empty response is wrong too; LongBench's script leaves it out of the count."""
    text = prediction if settings.mode == "sentence" else f"{BEGIN}{prediction.strip()})"
    found = (re.search(pattern, text.strip().replace("*", "")) for pattern in PATTERNS)
    letter = next((match[1] for match in found if match), None)
    return {METRIC: float(letter == example.answers[0])}


def averages(settings: Settings, cells: Sequence[Cell]) -> list[Average]:
    return [Average(AVERAGE, cells)] if cells else []


def groups(scored: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Questions of each difficulty and length, then those that were read whole."""
    facts, parts = [(one, one.example.facts) for one in scored], {}
    parts["easy"] = [one for one, fact in facts if fact["difficulty"] == "easy"]
    parts["hard"] = [one for one, fact in facts if fact["difficulty"] != "easy"]
    for length in ("short", "medium", "long"):
        parts[length] = [one for one, fact in facts if fact["length"] == length]
    parts["uncut"] = [one for one, fact in facts if not fact["is_cut"]]
    return parts


@kept
def read_data(source: str) -> list[Row]:
    """The rows, checked. A list in one JSON file, or rows as other data sets have them."""
    path = Path(source)
    path = path / "data.json" if path.is_dir() else path
    if path.is_file() and path.suffix == ".json":
        try:
            rows = json.loads(path.read_text("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not JSON ({error}).") from error
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UserError(f"{path} must hold a list of questions, as LongBench v2's data.json.")
    else:
        forms = f"data.json, a file of its rows, or {HUB_ID}"
        rows = load_rows(path, "LongBench v2", forms, "train")
    for number, row in enumerate(rows, 1):
        where = f"{source}, question {number}"
        if "choices" in row:
            raise UserError(f"{where} has `choices`: lm-eval's copy, another form; use {HUB_ID}.")
        require(row, where, str, *FIELDS)
        if row["answer"] not in CHOICES:
            raise UserError(f"{where}: the answer is {row['answer']!r:.40}, not A, B, C or D.")
    if not rows:
        raise UserError(f"{source} holds no questions.")
    return rows


title = "LongBench v2"
report_order = 2.5


def reported_scores(rows: Sequence[Row]) -> list[ReportedScore]:
    names = dict.fromkeys(row["task"] for row in rows if row["task"] not in (AVERAGE, TASK.name))
    average = ReportedScore("longbench_v2", AVERAGE, "average", {(TASK.name, 0): 1.0}, True)
    return [average, *(ReportedScore("longbench_v2", name, "part", {}, True) for name in names)]
