"""Answers of hundreds of tokens that depend on far text, scored along the answer.

Each new line pushes its source further away, out of the window, where a model's own earlier lines
stay. Every task shows a short example, then numbered lines, then filler, and asks for lines:

    recite    the list once more, in its order
    lookup    the values of the keys, in another order
    running   the total after each of the steps: the far step and the near total

`quarter_1` to `quarter_4` are the shares of right lines in each quarter of the answer. A model with
full attention is flat; what falls is what windows lose.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bosch.config import at_least
from bosch.data.key_words import wonderwords_keys
from bosch.data.needles import NOISE, DoesNotFitError, distances_to_end, largest, token_counter
from bosch.eval.averages import AVERAGE
from bosch.eval.suites._common import Tokenizer, check_names
from bosch.eval.suites._interface import Average, Cell, Example, Request, Stop, Task
from bosch.eval.suites._reporting import ReportedScore, Row

METRIC = "lines"
QUARTERS = tuple(f"quarter_{number}" for number in (1, 2, 3, 4))
REQUESTS = {
    "recite": "The whole list once more:\n",
    "lookup": "The keys in that order, with their values:\n",
    "running": "Totals after each step:\n",
}
LINE = re.compile(r"^[^\S\n]*(\d+)\.[^\S\n]*(.*?)[^\S\n]*$", re.MULTILINE)
VERSION = 2  # 1: a line without a value took the next one with it


@dataclass(frozen=True)
class Settings:
    tasks: tuple[str, ...] = tuple(REQUESTS)
    lengths: tuple[int, ...] = (4_096, 8_192, 16_384, 32_768)  # tokens with the answer
    answer_tokens: int = 256  # as many lines as fit
    samples: int = 100  # for each task and length
    seed: int = 42

    def __post_init__(self) -> None:
        check_names(self.tasks, REQUESTS, "a task of long answers")
        at_least(1, self, "long_answers", "samples")
        at_least(4, self, "long_answers", "answer_tokens")  # the example in front has a quarter


def configure(request: Request) -> tuple[Settings, int]:
    count, lengths = request.config.niah_samples, request.config.niah_lengths
    samples = max(Settings.samples, count)
    return Settings(lengths=lengths or Settings.lengths, samples=samples), count


def list_tasks(settings: Settings) -> list[Task]:
    return [Task(name, length) for length in settings.lengths for name in settings.tasks]


def sources(settings: Settings, task: Task) -> dict[str, str]:
    words, tokens = wonderwords_keys().name, str(settings.answer_tokens)
    numbers = {"seed": str(settings.seed), "samples": str(settings.samples)}
    return numbers | {"answer_tokens": tokens, "words": words}


def build_examples(
    settings: Settings, task: Task, tokenizer: Tokenizer, limit: int | None = None
) -> list[Example]:
    return [build(settings, task, index, tokenizer) for index in range(settings.samples)[:limit]]


def build(settings: Settings, task: Task, index: int, tokenizer: Tokenizer) -> Example:
    """Needs no other example. The filler is the same for all."""
    rng = random.Random(f"{settings.seed}/{task.name}/{task.length}/{index}")
    count = token_counter(tokenizer)
    given, asked, answer = fitting_lines(task.name, rng, settings.answer_tokens, count)
    # A model that writes a line too many, or with other blanks, must not be cut off before its end.
    budget = int(1.1 * count(numbered(answer))) + 16
    head = shown(task.name) + numbered(given) + "\n\n"
    tail = "\n\n" + (f"Keys in order:\n{numbered(asked)}\n\n" if asked else "")
    tail += REQUESTS[task.name] + "1."

    def fits(units: int) -> bool:
        return count(head + " ".join([NOISE] * units) + tail) + budget <= task.length

    if not fits(0):
        problem = f"{task.name} of {len(answer)} lines cannot be built in {task.length} tokens"
        raise DoesNotFitError(f"{problem}; use a greater length, or lower answer_tokens.")
    prompt = head + " ".join([NOISE] * largest(fits, 0, task.length)) + tail
    begins = [match.start() for match in re.finditer(r"^\d+\. ", head, re.MULTILINE)][-len(given) :]
    distances = distances_to_end(prompt, begins, tokenizer)
    if asked:  # in the order of the answer
        distances = [distances[[line.split(":")[0] for line in given].index(key)] for key in asked]
    written = [count(f" {line}\n{number}.") for number, line in enumerate(answer, 2)]
    stop = Stop(strings=(f"\n{len(answer) + 1}.",))
    facts = {"distances": distances, "written": [0, *accumulate(written)][:-1], "given": given}
    return Example(index, prompt, tuple(answer), budget, stop, facts)


def fitting_lines(
    task: str, rng: random.Random, tokens: int, count: Callable[[str], int]
) -> tuple[list[str], list[str], list[str]]:
    """What is listed, the keys asked for in their order (none: the list's own), and the answer, of
    as many lines as fit into these tokens."""
    most = tokens // 4  # a line has more
    if task == "running":
        total = first = rng.randrange(10, 100)
        given, answer = [], []
        for _ in range(most):
            step = rng.randrange(1, 10) * rng.choice((-1, 1))
            step = step if total + step in range(1_000) else -step
            total += step
            given.append(f"{'add' if step > 0 else 'subtract'} {abs(step)}")
            answer.append(str(total))
        given[0] = f"start with {first}, then {given[0]}"
    else:
        words = wonderwords_keys()
        keys = list(dict.fromkeys(words[rng.randrange(len(words))] for _ in range(most)))
        given = answer = [f"{key}: {rng.randrange(10**6, 10**7)}" for key in keys]
    size = largest(lambda n: count(numbered(answer[:n])) <= tokens, 1, len(answer))
    given, answer = given[:size], answer[:size]
    if task != "lookup":
        return given, [], answer
    answer = rng.sample(given, size)
    return given, [line.split(":")[0] for line in answer], answer


def shown(task: str) -> str:
    """The example in front: as the task, without filler."""
    rng = random.Random(f"{task}/example")
    given, asked, answer = fitting_lines(task, rng, 10**3, lambda t: 250 * (t.count("\n") + 1))
    keys = f"Keys in order:\n{numbered(asked)}\n\n" if asked else ""
    return f"{numbered(given)}\n\n{keys}{REQUESTS[task]}{numbered(answer)}\n\n\n"


def numbered(lines: Sequence[str]) -> str:
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def score(settings: Settings, task: Task, example: Example, prediction: str) -> dict[str, float]:
    lines = LINE.findall("1." + prediction)
    found = {int(number): text for number, text in reversed(lines)}  # the first of each number
    gold = example.answers
    right = [found.get(number) == text for number, text in enumerate(gold, 1)]
    scores = {METRIC: sum(right) / len(right)}
    for number, name in enumerate(QUARTERS):
        # Of fewer than four lines some quarters are empty: they get the score of the whole.
        part = right[len(right) * number // 4 : max(1, len(right) * (number + 1) // 4)]
        scores[name] = sum(part) / len(part) if part else scores[METRIC]
    scores["prefix"] = ([*right, False].index(False)) / len(right)
    # A model that has lost the list repeats one line under rising numbers.
    alike = [a == b for (_, a), (_, b) in pairwise(lines)]  # three in a row
    scores["loops"] = float(any(one and other for one, other in pairwise(alike)))
    if task.name == "running":
        # Right by the model's own total before: else the far step is lost, not the sum.
        signed = (line.split()[-2:] for line in example.facts["given"])
        steps = [int(n) if word == "add" else -int(n) for word, n in signed]
        totals = {n: int(text) for n, text in found.items() if text.isdecimal()}
        before = [int(gold[0]) - steps[0], *(totals.get(n) for n in range(1, len(gold)))]
        own = [
            total is not None and totals.get(n) == total + step
            for n, (total, step) in enumerate(zip(before, steps, strict=True), 1)
        ]
        scores["local"] = sum(own) / len(own)
    return scores


def averages(settings: Settings, cells: Sequence[Cell]) -> list[Average]:
    """Of all tasks, and of each quarter of their answers."""
    if not cells:
        return []
    quarters = [Average(quarter, cells, metric=quarter) for quarter in QUARTERS]
    return [Average(AVERAGE, cells), *quarters]


def floor(example: Example, window_tokens: int) -> float | None:
    """A line counts if its source is still in the window where it is written."""
    places = zip(example.facts["distances"], example.facts["written"], strict=True)
    inside = [distance + written <= window_tokens for distance, written in places]
    return sum(inside) / len(inside)


title = "long answers"
report_order = 3
parts_title = "quarters of the answer"


def reported_scores(rows: Sequence[Row]) -> list[ReportedScore]:
    """The average of the tasks, and of each quarter of their answers."""
    cells = {(row["task"], row["length"] or 0): 1 for row in rows if row["task"] in REQUESTS}
    weights = {cell: 1 / len(cells) for cell in cells}
    evaluated = {row["task"] for row in rows}
    parts = [ReportedScore("long_answers", q, "part", {}, True) for q in QUARTERS if q in evaluated]
    return [ReportedScore("long_answers", AVERAGE, "average", weights, True), *parts]
