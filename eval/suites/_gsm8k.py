"""GSM8K, the seventh category of the paper's LongBench, as lm-eval's task `gsm8k_cot` has it: its 8
shots and its scores. By itself it is `--suite lm-eval:gsm8k_cot`."""

import json
import re
from hashlib import sha256
from pathlib import Path

from bosch.eval.rows import Row, find_one, load_rows, require, require_count
from bosch.eval.suites._interface import Example, Stop
from bosch.run.kept import kept

HUB_ID = "openai/gsm8k"
NUM_ROWS = 1319
HEADLINE = "exact_match_flexible"  # counts in the average over categories
SHOTS_FILE = Path(__file__).parents[1] / "data" / "gsm8k_cot_shots.json"
STOPS = ("Q:", "</s>", "<|im_end|>")
# The last dot matches any character, as in lm-eval: an output that ends in "The answer is 72"
# gives 7.
STRICT = r"The answer is (\-?[0-9\.\,]+)."
FLEXIBLE = r"-?[$0-9.,]{2,}|-?[0-9]+"
IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")  # deleted from both texts, in this order


def sources(data: str) -> dict[str, str]:
    """A hash of the rows' content, so that the file format does not matter."""
    rows = [[row["question"], row["answer"]] for row in read_test_rows(data)]
    return {"test_sha256": sha256(json.dumps(rows).encode()).hexdigest()}


def build_examples(data: str, limit: int | None = None) -> list[Example]:
    fixed = json.loads(SHOTS_FILE.read_text(encoding="utf-8"))["shots"]
    shots = "".join(f"Q: {shot['question']}\nA: {shot['target']}\n\n" for shot in fixed)
    return [
        Example(n, f"{shots}Q: {row['question']}\nA:", (row["answer"],), 256, Stop(strings=STOPS))
        for n, row in enumerate(read_test_rows(data)[:limit])
    ]


def score(example: Example, prediction: str) -> dict[str, float]:
    """Strict: the first number in the form of the shots is right. Flexible: the last in any is."""
    # Generation ends there too, but the text still holds the string it ended with.
    for stop in STOPS:
        prediction = prediction.split(stop)[0]
    gold = normalize(example.answers[0].split("####")[-1].strip())
    first, last = re.findall(STRICT, prediction), re.findall(FLEXIBLE, prediction)
    found = {"exact_match_strict": [*first, "[invalid]"][0], HEADLINE: ["[invalid]", *last][-1]}
    return {metric: float(normalize(number) == gold) for metric, number in found.items()}


def normalize(number: str) -> str:
    for pattern in IGNORED:
        number = re.sub(pattern, "", number)
    return number.lower()


@kept
def read_test_rows(source: str) -> list[Row]:
    path = Path(source)
    if path.is_dir():
        path = find_one(path, "main", "test", ("{}*.parquet",))
    forms = f"a folder with test.jsonl, a file of test rows, or {HUB_ID}"
    rows = load_rows(path, "GSM8K test", forms, "test", "main")
    for number, row in enumerate(rows, 1):
        require(row, f"{path}, row {number}", str, "question", "answer")
    require_count(rows, NUM_ROWS, "GSM8K's test", str(path))
    return rows
