"""GSM8K with lm-eval's prompts and scores: `gsm8k_cot` has 8 fixed shots, `gsm8k` 5 random."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from bosch.eval.rows import Row, find_one, load_rows, require, require_count
from bosch.eval.suites._common import Tokenizer, check_names, task_results
from bosch.eval.suites._interface import Example, Request, Result, Scored, Stop, Task
from bosch.run.errors import UserError

HUB_ID = "openai/gsm8k"
NUM_ROWS = {"train": 7473, "test": 1319}
COT = Task("gsm8k_cot")
HEADLINE = "exact_match_flexible"  # counts in the average over categories
SHOTS_FILE = Path(__file__).parents[1] / "data" / "gsm8k_cot_shots.json"

# The last dot in gsm8k_cot's pattern matches any character, as in lm-eval: an output that ends in
# "The answer is 72" gives 7.
STRICT = {"gsm8k": r"#### (\-?[0-9\.\,]+)", "gsm8k_cot": r"The answer is (\-?[0-9\.\,]+)."}
QUESTION, ENDS = {"gsm8k": "Question:", "gsm8k_cot": "Q:"}, ("</s>", "<|im_end|>")
IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")  # deleted from both texts, in this order


@dataclass(frozen=True)
class Settings:
    data: str = HUB_ID  # a hub id, a folder with train and test, or a file of test rows
    tasks: tuple[str, ...] = (COT.name,)

    def __post_init__(self) -> None:
        check_names(self.tasks, STRICT, "a task of GSM8K")


def configure(request: Request) -> tuple[Settings, int | None]:
    return Settings(request.config.gsm8k_data, request.config.gsm8k_tasks), request.config.samples


def files(settings: Settings) -> dict[str, str]:
    return {"data": settings.data}


def list_tasks(settings: Settings) -> list[Task]:
    return [Task(name) for name in settings.tasks]


def sources(settings: Settings, task: Task) -> dict[str, str]:
    """Hashes of the rows' content, so that the file format does not matter."""
    hashes = {}
    for split in ("test",) if task == COT else ("train", "test"):
        rows = [[row["question"], row["answer"]] for row in read_split(settings.data, split)]
        hashes[f"{split}_sha256"] = sha256(json.dumps(rows).encode()).hexdigest()
    return hashes


def build_examples(
    settings: Settings, task: Task, tokenizer: Tokenizer, limit: int | None = None
) -> list[Example]:
    rows, prompts = read_split(settings.data, "test")[:limit], []
    if task == COT:
        fixed = json.loads(SHOTS_FILE.read_text(encoding="utf-8"))["shots"]
        text = "".join(f"Q: {shot['question']}\nA: {shot['target']}\n\n" for shot in fixed)
        prompts = [f"{text}Q: {row['question']}\nA:" for row in rows]
    else:  # each draws from one generator, so they are lm-eval's only from the first test row on
        train, rng = read_split(settings.data, "train"), random.Random(1234)
        for row in rows:
            shots = rng.sample(train, 5)
            texts = [f"Question: {shot['question']}\nAnswer: {shot['answer']}" for shot in shots]
            prompts.append("\n\n".join([*texts, f"Question: {row['question']}\nAnswer:"]))
    stop = Stop(strings=(QUESTION[task.name], *ENDS))
    pairs = enumerate(zip(prompts, rows, strict=True))
    return [Example(n, prompt, (row["answer"],), 256, stop) for n, (prompt, row) in pairs]


def score(settings: Settings, task: Task, example: Example, prediction: str) -> dict[str, float]:
    """Strict: the first number in the form of the shots is right. Flexible: the last in any is."""
    for stop in (QUESTION[task.name], *ENDS):
        prediction = prediction.split(stop)[0]
    # lm-eval's gsm8k_cot compares with the answer's end; gsm8k with all of it, which IGNORED cuts.
    answer = example.answers[0]
    gold = normalize(answer.split("####")[-1].strip() if task == COT else answer)
    first = re.findall(STRICT[task.name], prediction)
    last = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", prediction)
    found = {"exact_match_strict": [*first, "[invalid]"][0], HEADLINE: ["[invalid]", *last][-1]}
    return {metric: float(normalize(number) == gold) for metric, number in found.items()}


def normalize(number: str) -> str:
    for pattern in IGNORED:
        number = re.sub(pattern, "", number)
    return number.lower()


def summarize(settings: Settings, scored: Sequence[Scored]) -> list[Result]:
    return task_results(scored, lambda scores: 100 * sum(scores) / len(scores))


@lru_cache(maxsize=4)
def read_split(source: str, split: str) -> list[Row]:
    path = Path(source)
    if path.is_dir():
        path = find_one(path, "main", split, ("{}*.parquet",))
    elif path.is_file() and split != "test":
        problem = f"{path} holds only test rows, but the task gsm8k draws its shots from train"
        raise UserError(f"{problem}. Name a folder with both, or use the task gsm8k_cot.")
    forms = f"a folder with train.jsonl and test.jsonl, a file of test rows, or {HUB_ID}"
    rows = load_rows(path, f"GSM8K {split}", forms, split, "main")
    for number, row in enumerate(rows, 1):
        require(row, f"{path}, row {number}", str, "question", "answer")
    require_count(rows, NUM_ROWS[split], f"GSM8K's {split}", str(path))
    return rows


title = "GSM8K"
report_order = 3


def headline_metric(task: str) -> str:
    return HEADLINE
