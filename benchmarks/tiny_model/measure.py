"""Measures an embedded tiny model on held-out test worlds:
`python -m benchmarks.tiny_model.measure scores --model DIR --out F`.

`scores` fills the table of the model card: NIAH at three lengths and toy LongBench, with full
attention and with every group windowed by Hugging Face's own sliding window. `masks` asks whether
choosing groups is a real problem on this model: random masks, whole layers, single ablations and a
swap search. Both append a row a measurement to a JSONL file and go on where they stopped.
"""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import bosch  # noqa: F401  registers the attention whose groups can be windowed
from bosch.calibration import Calibration, Haystack, Question
from bosch.masks.mask import num_windowed
from bosch.search.evaluations import MaskObjective
from bosch.search.optimizers._interface import Problem, optimize
from bosch.search.scorer import Accelerations, Scorer
from data.needles import PAPER_TASKS, TASKS, TOY_SIZES, build_examples
from data.toy_world.essays import ToyEssays
from data.toy_world.tasks import DATASETS, longbench_rows
from data.toy_world.tokenizer import END_OF_TEXT
from data.toy_world.world import key_words
from eval.generate import Generator
from eval.metrics.string_match import string_match_all
from eval.suites import _interface as suites

LENGTHS = (512, 1024, 2048)
Z = list[list[int]]


@dataclass(frozen=True)
class Example:
    task: str
    prompt: str
    prompt_ids: list[int]
    answer_ids: list[int]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    right: bool  # every answer token is the arg-max: greedy generation gives exactly this answer
    log_probability: float  # mean over the answer's tokens


def needle_examples(
    tokenizer: PreTrainedTokenizerFast, length: int, samples: int, split: str, seed: int
) -> list[Example]:
    examples = []
    essays, words = ToyEssays(split, seed), key_words(split)
    for name in PAPER_TASKS:
        try:
            rows = build_examples(
                TASKS[name], length, samples, seed, tokenizer, essays, words, TOY_SIZES
            )
        except ValueError as error:
            print(f"left out: {error}")
            continue
        for built in rows:
            prompt = tokenizer(built.prompt, add_special_tokens=False)["input_ids"]
            answer = tokenizer(" " + built.outputs[0], add_special_tokens=False)["input_ids"]
            examples.append(Example(name, built.prompt, prompt, answer, built.outputs))
    return examples


def task_examples(
    tokenizer: PreTrainedTokenizerFast, samples: int, split: str, seed: int
) -> list[Example]:
    """Toy LongBench; the answer includes the end of what is judged, so that `right` means answered
    exactly."""
    examples = []
    for name, dataset in DATASETS.items():
        for row in longbench_rows(name, samples, seed, split=split):
            prompt = dataset.prompt.format(**row)
            blank = "" if prompt.endswith("\n") else " "
            prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            # As LongBench judges them, few-shot sets by the first line and the others to the end.
            ending = "" if dataset.category == "few-shot" else END_OF_TEXT
            answer = blank + row["answers"][0] + ending
            answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
            examples.append(Example(name, prompt, prompt_ids, answer_ids, tuple(row["answers"])))
    return examples


@torch.no_grad()
def score(
    model: PreTrainedModel,
    examples: Sequence[Example],
    z: Z | None = None,
    window: int = 64,
    batch_tokens: int = 8192,
) -> list[Outcome]:
    """Teacher forcing in batches of like length. Padding stands on the right, where a causal model
    never sees it."""
    head: Any = model.get_output_embeddings()
    hybrid = {} if z is None else {"bosch_mask": z, "bosch_window": window}
    order = sorted(
        range(len(examples)),
        key=lambda i: len(examples[i].prompt_ids) + len(examples[i].answer_ids),
    )
    outcomes: dict[int, Outcome] = {}
    batch: list[int] = []
    for position, index in enumerate(order):
        batch.append(index)
        longest = len(examples[index].prompt_ids) + len(examples[index].answer_ids)
        if (len(batch) + 1) * (longest + 8) < batch_tokens and position + 1 < len(order):
            continue
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, i in enumerate(batch):
            tokens = examples[i].prompt_ids + examples[i].answer_ids
            ids[row, : len(tokens)] = torch.tensor(tokens)
        hidden = model.base_model(ids[:, :-1], use_cache=False, **hybrid).last_hidden_state
        for row, i in enumerate(batch):
            answer = torch.tensor(examples[i].answer_ids)
            start = len(examples[i].prompt_ids) - 1
            logits = head(hidden[row, start : start + len(answer)]).float()
            log_probability = logits.log_softmax(-1).gather(1, answer[:, None]).mean()
            outcomes[i] = Outcome(bool((logits.argmax(-1) == answer).all()), float(log_probability))
        batch = []
    return [outcomes[i] for i in range(len(examples))]


def ruler_scores(
    model: Any, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]
) -> list[float]:
    """RULER's string match of greedy generation, 40 new tokens."""
    stop = suites.Stop(when_answered=True)
    asked = [
        (("niah", 0, index), suites.Example(index, example.prompt, example.outputs, 40, stop))
        for index, example in enumerate(examples)
    ]
    texts = {made.key: made.text for made in Generator(model, tokenizer).generate(asked)}
    return [string_match_all(texts[key], example.answers) for key, example in asked]


def by_task(examples: Sequence[Example], values: Iterable[float]) -> dict[str, float]:
    """Mean of each task, in per cent."""
    table: dict[str, list[float]] = {}
    for example, value in zip(examples, values, strict=True):
        table.setdefault(example.task, []).append(100 * value)
    return {task: sum(numbers) / len(numbers) for task, numbers in table.items()}


def category_means(scores: dict[str, float]) -> dict[str, float]:
    table: dict[str, list[float]] = {}
    for name, value in scores.items():
        table.setdefault(DATASETS[name].category, []).append(value)
    return {category: sum(numbers) / len(numbers) for category, numbers in table.items()}


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def load(folder: Path, windowed: bool = False, window: int = 64) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder)
    if windowed:  # Hugging Face's own sliding window in every layer
        config.use_sliding_window, config.sliding_window = True, window
        config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()


@dataclass(frozen=True)
class Scores:
    """NIAH and toy LongBench of the model, and of the model with all groups windowed."""

    model: Path
    out: Path
    samples: int = 200
    lengths: tuple[int, ...] = LENGTHS
    window: int = 64
    seed: int = 0

    def run(self) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(self.model)
        rows = Rows(self.out)
        for windowed in (False, True):
            model = load(self.model, windowed, self.window)
            name = "windowed" if windowed else "full"
            for length in self.lengths:
                rows.add(f"{name} niah {length}", partial(self._needles, model, tokenizer, length))
            rows.add(f"{name} tasks", partial(self._tasks, model, tokenizer))

    def _needles(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, length: int
    ) -> dict:
        examples = needle_examples(tokenizer, length, self.samples, "test", self.seed)
        scores = by_task(examples, ruler_scores(model, tokenizer, examples))
        return {"samples": self.samples, "mean": mean(scores.values()), "scores": scores}

    def _tasks(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict:
        examples = task_examples(tokenizer, self.samples, "test", self.seed)
        scores = by_task(examples, (float(outcome.right) for outcome in score(model, examples)))
        categories = category_means(scores)
        return {
            "samples": self.samples,
            "mean": mean(categories.values()),
            "scores": scores,
            "categories": categories,
        }


@dataclass(frozen=True)
class Masks:
    """Is choosing groups a real problem here? Random masks, whole layers, single ablations, and a
    swap search."""

    model: Path
    out: Path
    samples: int = 25
    length: int = 1024
    window: int = 64
    evaluations: int = 300
    calibration_samples: int = 3
    memory_gb: float = 4.0  # of hidden states that masks have in common
    seed: int = 0

    def run(self) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(self.model)
        model = load(self.model)
        model.set_attn_implementation("bosch")
        num_layers, num_groups = model.config.num_hidden_layers, model.config.num_key_value_heads
        rows = Rows(self.out)
        test = needle_examples(tokenizer, self.length, self.samples, "test", self.seed)
        test += task_examples(tokenizer, self.samples, "test", self.seed)
        calibration = needle_examples(
            tokenizer, self.length, self.calibration_samples, "calibration", self.seed
        )
        calibration += task_examples(tokenizer, self.calibration_samples, "calibration", self.seed)

        judge = judge_of(model, test, self.window, self.memory_gb)

        def measure(z: Z) -> dict:
            return summary(test, judge(z)) | {"z": ["".join(map(str, row)) for row in z]}

        def search_and_measure(start: Z) -> dict:
            return measure(search_by_swaps(model, calibration, start, self))

        full = [[1] * num_groups for _ in range(num_layers)]
        rows.add("dense", partial(measure, full))
        rows.add("all windowed", partial(measure, [[0] * num_groups for _ in range(num_layers)]))
        for ratio in (0.75, 0.5, 0.875):
            quota = num_windowed(ratio, num_layers, num_groups)
            rng = random.Random(f"search/{self.seed}/{ratio}")
            start = random_mask(num_layers, num_groups, quota, rng)
            rows.add(f"swap search {ratio}", partial(search_and_measure, start))
            rng = random.Random(f"{self.seed}/{ratio}")
            for index in range(20 if ratio == 0.75 else 5):
                z = random_mask(num_layers, num_groups, quota, rng)
                rows.add(f"random {ratio} {index}", partial(measure, z))
        for kept in itertools.combinations(range(num_layers), num_layers // 4):
            z = [[int(layer in kept)] * num_groups for layer in range(num_layers)]
            rows.add(f"layers {kept}", partial(measure, z))
        for layer in range(num_layers):
            z = [[int(other != layer)] * num_groups for other in range(num_layers)]
            rows.add(f"without layer {layer}", partial(measure, z))
        for layer, group in itertools.product(range(num_layers), range(num_groups)):
            z = [
                [int((i, g) != (layer, group)) for g in range(num_groups)]
                for i in range(num_layers)
            ]
            rows.add(f"without group {layer}.{group}", partial(measure, z))


@dataclass(frozen=True)
class Tables:
    """The model card's tables, in Markdown, from the rows that `scores` and `masks` wrote."""

    scores: Path | None = None
    masks: Path | None = None

    def run(self) -> None:
        if self.scores:
            print("\n".join(score_table(read_rows(self.scores))), end="\n\n")
        if self.masks:
            print("\n".join(mask_table(read_rows(self.masks))))


def read_rows(path: Path) -> dict[str, dict]:
    return {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}


def score_table(rows: dict[str, dict]) -> list[str]:
    """A line a task, a column a length, full attention and then everything windowed."""
    lines = []
    for kind in ("niah", "tasks"):
        names = [name for name in rows if f" {kind}" in name]
        lines += ["", "| % | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        columns = [
            {"mean": row["mean"], **row["scores"], **row.get("categories", {})}
            for row in map(rows.__getitem__, names)
        ]
        for task in dict.fromkeys(task for column in columns for task in column):
            cells = [f"{column[task]:.1f}" if task in column else "-" for column in columns]
            lines.append(f"| {task} | " + " | ".join(cells) + " |")
    return lines[1:]


def mask_table(rows: dict[str, dict]) -> list[str]:
    """One line a family of masks: how many, mean, least and most of NIAH and toy LongBench
    together, and the mean log-probability of the answers."""
    families: dict[str, list[dict]] = {}
    for name, row in rows.items():
        words = name.split(" ")
        of_two = "layers kept" if words[0] == "layers" else " ".join(words[:2])
        family = name if words[0] == "swap" else of_two
        families.setdefault(family, []).append(row)
    lines = [
        "| masks | number | mean | least | most | log-probability |",
        "|---|---|---|---|---|---|",
    ]
    for family, members in families.items():
        means = [row["mean"] for row in members]
        log_probability = mean(row["log_probability"] for row in members)
        lines.append(
            f"| {family} | {len(members)} | {mean(means):.1f} | {min(means):.1f} "
            f"| {max(means):.1f} | {log_probability:.2f} |"
        )
    return lines


def summary(examples: Sequence[Example], outcomes: Sequence[Outcome]) -> dict:
    scores = by_task(examples, (float(outcome.right) for outcome in outcomes))
    needles = mean(scores[name] for name in PAPER_TASKS)
    tasks = mean(category_means({name: scores[name] for name in DATASETS}).values())
    return {
        "mean": (needles + tasks) / 2,
        "niah": needles,
        "tasks": tasks,
        "log_probability": mean(outcome.log_probability for outcome in outcomes),
        "scores": scores,
    }


def random_mask(num_layers: int, num_groups: int, quota: int, rng: random.Random) -> Z:
    """A mask with exactly `quota` windowed groups."""
    bits = [0] * quota + [1] * (num_layers * num_groups - quota)
    rng.shuffle(bits)
    return [bits[i * num_groups : (i + 1) * num_groups] for i in range(num_layers)]


def judge_of(
    model: Any, examples: Sequence[Example], window: int, memory_gb: float
) -> Callable[[Sequence[Sequence[int]]], list[Outcome]]:
    """What masks make of these examples: as `score`, but masks that have lower layers in common
    compute them once."""
    keeping = Accelerations(memory_gb=memory_gb)
    scorer = Scorer(model, as_calibration(examples), window, keeping)

    def judge(z: Sequence[Sequence[int]]) -> list[Outcome]:
        answers, _ = scorer.score(tuple(map(tuple, z)), range(len(examples)))
        return [
            Outcome(answer.correct, answer.log_probability / len(example.answer_ids))
            for number, example in enumerate(examples)
            for answer in answers[number]
        ]

    return judge


def search_by_swaps(model: Any, examples: Sequence[Example], start: Z, plan: "Masks") -> Z:
    """The best mask on these examples of as many groups on the window as the start has."""
    objective = MaskObjective(
        Scorer(model, as_calibration(examples), plan.window),
        as_calibration(examples),
        "accuracy+probability",
    )
    num_groups = len(start[0])

    def rows(bits: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        places = range(0, len(bits), num_groups)
        return tuple(tuple(bits[place : place + num_groups]) for place in places)

    bits = tuple(itertools.chain.from_iterable(start))
    problem = Problem(
        num_variables=len(bits),
        quota=bits.count(0),
        evaluate=lambda bits, threshold: objective(rows(bits), threshold),
        max_evaluations=plan.evaluations,
        seed=plan.seed,
        starts=(bits,),
    )
    return [list(row) for row in rows(optimize("swap", problem).bits)]


def as_calibration(examples: Sequence[Example]) -> Calibration:
    """One text an example. Where its needle is does not matter to a score."""
    haystacks = []
    for example in examples:
        ids_T = torch.tensor(example.prompt_ids + example.answer_ids)
        answer = range(len(example.prompt_ids), len(ids_T))
        haystacks.append(Haystack(ids_T, (Question(answer, answer, example.task),)))
    return Calibration(haystacks)


class Rows:
    """Named measurements, one JSON line each; one that is in the file already is not made again."""

    def __init__(self, path: Path):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._known = (
            {json.loads(line)["name"] for line in path.read_text().splitlines()}
            if path.exists()
            else set()
        )

    def add(self, name: str, measure: Callable[[], dict]) -> None:
        if name in self._known:
            return
        began = time.monotonic()
        row = {"name": name, **measure(), "seconds": round(time.monotonic() - began, 1)}
        with open(self._path, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{name}: {row['mean']:.1f}",
            {k: round(v, 1) for k, v in row["scores"].items()},
            flush=True,
        )


def main() -> None:
    command = tyro.cli(
        Annotated[Scores, tyro.conf.subcommand("scores")]
        | Annotated[Masks, tyro.conf.subcommand("masks")]
        | Annotated[Tables, tyro.conf.subcommand("tables")],
        description=__doc__,
    )
    command.run()


if __name__ == "__main__":
    main()
