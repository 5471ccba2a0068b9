"""NIAH by our generator beside plain `generate`: all speed-ups, each alone, and the same scores.

`generate` runs on the model as transformers loads it, with its own attention. Both sides read the
same prompts one task after the other, in turns. `--run-on` takes the model's end token away, as
base models behave that go on behind their answer to RULER's 128 tokens; a model that stops itself
leaves little but the prompt to be saved. With the package lm-eval installed, its own NIAH of the
same tasks, length and number of samples stands beside them.
"""

import json
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks._options import BenchmarkOptions
from benchmarks._timing import (
    choose_device,
    describe_device,
    now,
    short,
    show_table,
    speedup,
)
from bosch.model import fetch_model
from bosch.run.progress import say
from data.needles import TOY_SIZES
from eval.generate import Generator, Key
from eval.judging import Judging, load_judged
from eval.lm_eval_bridge import run_lm_eval
from eval.metrics.string_match import string_match_all
from eval.results import SCORES
from eval.settings import FAST, PLAIN, Label
from eval.suites import niah
from eval.suites._interface import Example, LeftOutError

SHOWS_TABLE = True  # so that benchmark.py prints only the rows with a target
TARGET = 3.0  # times as fast as plain generate, at RULER's number of tokens
RULER_TOKENS = 128
GENERATE, EVERYTHING = "generate", "all speed-ups"
SIDES = {
    "plain": PLAIN,
    "stop when answered": replace(PLAIN, stop_when_answered=True),
    "draft and stop": replace(PLAIN, draft_answers=True, stop_when_answered=True),
    "shared beginnings": replace(PLAIN, share_prefixes=True),
    "short top layer": replace(PLAIN, short_top_layer=True),
    "batch": replace(PLAIN, batch=FAST.batch),
    EVERYTHING: FAST,
}
LM_EVAL_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3")
Examples = list[tuple[Key, Example]]
Side = Callable[[Examples], dict[Key, str]]


@dataclass(frozen=True)
class Options(BenchmarkOptions):
    model: str = "tiny-qwen3"
    """A folder or hub id, dense or hybrid."""
    length: int = 2048
    """Tokens of prompt and answer."""
    samples: int = 32
    """Of each of the six tasks. RULER takes 500; the more, the longer the beginnings they share."""
    run_on: bool = True
    """Ignore the model's end token, and generate RULER's 128 tokens. Else it stops by itself."""
    only_all: bool = False
    """Leave out the sides with a single speed-up."""
    lm_eval: bool = True
    """If it is installed."""
    essays: str = "toy"
    rounds: int = 2
    threads: int = 1
    device: str | None = None
    """None: the GPU if there is one."""


def measure(options: Options) -> list[dict[str, Any]]:
    device = choose_device(options.device)
    torch.set_num_threads(options.threads)
    folder = fetch_model(options.model)
    model: Any = load_judged(folder, Judging(())).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stock: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
    stock.to(device).eval()
    if options.run_on:
        stock.generation_config.eos_token_id = model.generation_config.eos_token_id = None
        tokenizer.eos_token = None
    tasks = build_tasks(options, tokenizer)

    sides: dict[str, Side] = {GENERATE: partial(by_generate, stock, tokenizer)}
    for name, settings in SIDES.items():
        if name == EVERYTHING or not options.only_all:
            sides[name] = partial(by_generator, model, tokenizer, settings)
    texts: dict[str, dict[Key, str]] = {name: {} for name in sides}
    seconds = {name: [0.0] * options.rounds for name in sides}
    for round_ in range(options.rounds):
        for task, examples in tasks.items():
            for name, side in sides.items():
                begin = now(device)
                texts[name] |= side(examples)
                seconds[name][round_] += now(device) - begin
            say(f"round {round_ + 1} of {options.rounds}: {task}")
    rows = report(options, device, tasks, texts, seconds)
    if options.lm_eval and find_spec("lm_eval"):
        rows += by_lm_eval(options, device, folder)
    return rows


def build_tasks(options: Options, tokenizer: Any) -> dict[str, Examples]:
    """The examples of each task, ordered as the runner orders them."""
    length = options.length
    if options.run_on and options.essays == niah.TOY:  # which keeps less room for the answer
        length -= RULER_TOKENS - TOY_SIZES.answer_tokens
    settings = niah.Settings(options.essays, lengths=(length,), samples=options.samples)
    tasks = {}
    for task in niah.list_tasks(settings):
        try:
            built = niah.build_examples(settings, task, tokenizer)
        except LeftOutError as error:
            say(f"left out: {error}")
            continue
        if options.run_on:
            built = [replace(example, max_new_tokens=RULER_TOKENS) for example in built]
        ordered = sorted(built, key=lambda example: example.prompt)
        tasks[task.name] = [((task.name, task.length, e.index), e) for e in ordered]
    return tasks


def by_generate(model: Any, tokenizer: Any, examples: Examples) -> dict[Key, str]:
    texts = {}
    for key, example in examples:
        ids = torch.tensor([tokenizer(example.prompt)["input_ids"]], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=example.max_new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        texts[key] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return texts


def by_generator(model: Any, tokenizer: Any, settings: Any, examples: Examples) -> dict[Key, str]:
    found = Generator(model, tokenizer, settings).generate(examples)
    return {generation.key: generation.text for generation in found}


def report(
    options: Options,
    device: torch.device,
    tasks: dict[str, Examples],
    texts: dict[str, dict[Key, str]],
    seconds: dict[str, list[float]],
) -> list[dict[str, Any]]:
    examples = [pair for members in tasks.values() for pair in members]
    scores = {name: scores_of(examples, texts[name]) for name in texts}
    what = f"NIAH at {short(options.length)}, " + ("128 tokens" if options.run_on else "to the end")
    rows: list[dict[str, Any]] = [
        {
            "name": f"{what}, {name}: an example",
            "value": median(seconds[name]) / len(examples),
            "unit": "s",
            "side": name,
            "speedup": speedup(seconds[GENERATE], seconds[name]),
            "score": 100 * sum(scores[name]) / len(examples),
            "differing": sum(map(operator.ne, scores[name], scores[GENERATE])),
        }
        for name in texts
    ]
    show_table(
        f"{options.model}, {what}, {len(examples)} examples, {describe_device(device)}",
        ("side", "s an example", "faster", "score", "scores that differ"),
        [
            (
                r["side"],
                f"{r['value']:.3f}",
                f"{r['speedup']:.2f}x",
                f"{r['score']:.1f}",
                r["differing"],
            )
            for r in rows
        ],
    )
    faster = {"name": f"{what}: faster than generate", "value": rows[-1]["speedup"], "unit": "x"}
    differing = {
        "name": f"{what}: scores that differ",
        "value": sum(row["differing"] for row in rows),
        "unit": "",
        "at_most": 0,
    }
    return [*rows, faster | ({"at_least": TARGET} if options.run_on else {}), differing]


def scores_of(examples: Examples, texts: dict[Key, str]) -> list[float]:
    return [string_match_all(texts[key], example.answers) for key, example in examples]


def by_lm_eval(options: Options, device: torch.device, folder: Path) -> list[dict[str, Any]]:
    """The tasks whose haystack lm-eval need not download, prompts and all."""
    model: Any = load_judged(folder, Judging(())).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with TemporaryDirectory() as name:
        out = Path(name)
        begin = now(device)
        run_lm_eval(
            model,
            tokenizer,
            LM_EVAL_TASKS,
            Label(options.model),
            out,
            options.length,
            (options.length,),
            options.samples,
        )
        seconds = now(device) - begin
        found = json.loads((out / SCORES).read_text())["rows"]
    rows = [
        {
            "name": f"lm-eval {row['task']} at {short(options.length)}: share right",
            "value": row["value"],
            "unit": "",
            "n": row["n"],
        }
        for row in found
    ]
    count = sum(row["n"] for row in rows)
    whole = {
        "name": f"lm-eval, {len(rows)} tasks, building included: an example",
        "value": seconds / count,
        "unit": "s",
    }
    show_table(
        f"lm-eval, {short(options.length)}, {options.samples} examples a task",
        ("task", "score"),
        [(row["task"], f"{100 * row['value']:.1f}") for row in found],
    )
    return [*rows, whole]
