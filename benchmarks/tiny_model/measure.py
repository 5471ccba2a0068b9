"""Measures an embedded tiny model on held-out test worlds, for the tables of its model card:
`python -m benchmarks.tiny_model.measure scores --model DIR --out FILE`.

Runs NIAH at three lengths and toy LongBench, with full attention and with Hugging Face's own
sliding window in every layer. Each measurement is appended to a JSONL file as one row. Measurements
that are in the file already are skipped.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks._options import Row
from bosch.data.toy_world.tasks import DATASETS, longbench_rows
from bosch.data.toy_world.tokenizer import END_OF_TEXT
from bosch.eval.generate import Generator
from bosch.eval.metrics.string_match import string_match_all
from bosch.eval.suites import niah
from bosch.eval.suites._interface import Example, LeftOutError
from bosch.model import LOCAL, fetch_model, load_tokenizer
from bosch.run.errors import exit_on_user_error
from bosch.training.model_start import read_config

Scores = dict[str, float]  # percent, by task
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Options:
    command: tyro.conf.Positional[Literal["scores"]]
    model: str  # a model folder or the name of an embedded model
    out: Path  # JSONL file for the scores
    samples: int = 200  # examples per task
    lengths: tuple[int, ...] = (512, 1024, 2048)  # lengths of the NIAH examples, in tokens
    window: int = 64  # window size in tokens
    seed: int = 0  # of the examples


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    folder = fetch_model(options.model)
    tokenizer = load_tokenizer(folder)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = {json.loads(line)["name"] for line in lines}
    for windowed in (False, True):
        model = load(folder, windowed, options.window)
        parts = {
            f"niah {length}": partial(measure_niah, model, tokenizer, length, options)
            for length in options.lengths
        }
        parts["tasks"] = partial(measure_tasks, model, tokenizer, options)
        for part, measure in parts.items():
            name = f"{'windowed' if windowed else 'full'} {part}"
            if name in done:
                continue
            began = time.monotonic()
            row = {"name": name, "samples": options.samples, **measure()}
            row["seconds"] = round(time.monotonic() - began, 1)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            scores = {task: round(value, 1) for task, value in row["scores"].items()}
            print(f"{name}: {row['mean']:.1f}", scores, flush=True)


def load(folder: Path, windowed: bool = False, window: int = 64) -> PreTrainedModel:
    config = read_config(folder)
    if windowed:  # Hugging Face's own sliding window in every layer
        config.use_sliding_window, config.sliding_window = True, window
        config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, **LOCAL
    )
    return model.eval()


def measure_niah(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, options: Options
) -> Row:
    examples = needle_examples(tokenizer, length, options.samples, options.seed)
    scores = ruler_scores(model, tokenizer, examples)
    return {"mean": mean(scores.values()), "scores": scores}


def needle_examples(
    tokenizer: PreTrainedTokenizerBase, length: int, samples: int, seed: int
) -> dict[str, list[Example]]:
    """Examples of those of the paper's six tasks that fit into the length."""
    settings = niah.Settings(lengths=(length,), samples=samples, seed=seed)
    examples = {}
    for task in niah.list_tasks(settings):
        try:
            examples[task.name] = niah.build_examples(settings, task, tokenizer)
        except LeftOutError as error:
            print(f"left out: {error}")
    return examples


def ruler_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: dict[str, list[Example]]
) -> Scores:
    """RULER's string match on greedy generation."""
    pairs = [((task, 0, e.index), e) for task, members in examples.items() for e in members]
    texts = {made.key: made.text for made in Generator(model, tokenizer).generate(pairs)}
    return {
        task: mean(100 * string_match_all(texts[task, 0, e.index], e.answers) for e in members)
        for task, members in examples.items()
    }


def measure_tasks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: Options
) -> Row:
    """Toy LongBench, where only exact answers count."""
    scores: Scores = {}
    categories: dict[str, list[float]] = {}
    for name, dataset in DATASETS.items():
        pairs = []
        for row in longbench_rows(name, options.samples, options.seed, split="test"):
            prompt = dataset.prompt.format(**row)
            blank = "" if prompt.endswith("\n") else " "
            # LongBench judges few-shot tasks by the first line, others by the whole answer.
            ending = "" if dataset.category == "few-shot" else END_OF_TEXT
            texts = (prompt, blank + row["answers"][0] + ending)
            pairs.append([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
        scores[name] = mean(100 * right for right in answered_exactly(model, pairs))
        categories.setdefault(dataset.category, []).append(scores[name])
    means = {category: mean(values) for category, values in categories.items()}
    return {"mean": mean(means.values()), "scores": scores, "categories": means}


@torch.no_grad()
def answered_exactly(model: PreTrainedModel, pairs: Sequence[Sequence[list[int]]]) -> list[bool]:
    """For each pair of prompt and answer, whether greedy generation would give exactly the answer:
    every token of it is the argmax. Uses teacher forcing in batches of similar length. Padding is
    on the right, where a causal model does not see it."""
    right: dict[int, bool] = {}
    batch: list[int] = []
    order = sorted(range(len(pairs)), key=lambda i: sum(map(len, pairs[i])))
    for position, index in enumerate(order):
        batch.append(index)
        longest = sum(map(len, pairs[index]))
        if (len(batch) + 1) * (longest + 8) < BATCH_TOKENS and position + 1 < len(order):
            continue
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, i in enumerate(batch):
            prompt, answer = pairs[i]
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        hidden = model.base_model(ids[:, :-1], use_cache=False).last_hidden_state
        for row, i in enumerate(batch):
            prompt, answer = pairs[i]
            start = len(prompt) - 1
            logits = model.get_output_embeddings()(hidden[row, start : start + len(answer)])
            right[i] = logits.argmax(-1).tolist() == answer
        batch = []
    return [right[i] for i in range(len(pairs))]


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


if __name__ == "__main__":
    exit_on_user_error(main, debug=False)
