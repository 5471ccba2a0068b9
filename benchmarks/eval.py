"""Compare our generator on NIAH with plain `generate`: each speed-up alone, and all together.

`generate` runs on the model as transformers loads it, with its own attention. All sides run the
same prompts, task by task, in turns, and must get the same scores. `--run-on` disables the model's
end token, so that it behaves like a base model, which goes on after its answer up to RULER's 128
tokens. A model that stops by itself spends nearly all its time on the prompt.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks._options import DeviceOptions, Row
from benchmarks._timing import describe_device, now, short, speedup
from bosch.data.needles import TOY_SIZES
from bosch.eval.generate import Generator, Key
from bosch.eval.judging import Judging, load_judged
from bosch.eval.metrics.string_match import string_match_all
from bosch.eval.settings import FAST, PLAIN, GenerationSettings
from bosch.eval.suites import niah
from bosch.eval.suites._interface import Example, LeftOutError
from bosch.model import LOCAL, fetch_model, load_tokenizer
from bosch.run.progress import say
from bosch.run.tables import show_rows

TARGET = 3.0  # speed-up over plain generate, with RULER's number of tokens
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
Examples = list[tuple[Key, Example]]
Side = Callable[[Examples], dict[Key, str]]


@dataclass(frozen=True)
class Options(DeviceOptions):
    model: str = "tiny-qwen3"  # a model folder or hub id, dense or hybrid
    length: int = 2048  # tokens in prompt and answer together
    # Examples of each of the six tasks. RULER uses 500. More examples share longer beginnings.
    samples: int = 32
    run_on: bool = True  # ignore the model's end token and always generate RULER's 128 tokens
    rounds: int = 2  # how often each side is timed


def measure(options: Options) -> list[Row]:
    device = options.start()
    folder = fetch_model(options.model)
    model: Any = load_judged(folder, Judging(())).to(device)
    tokenizer = load_tokenizer(folder)
    stock: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, **LOCAL)
    stock.to(device).eval()
    if options.run_on:
        stock.generation_config.eos_token_id = model.generation_config.eos_token_id = None
        tokenizer.eos_token = None
    tasks = build_tasks(options, tokenizer)

    sides: dict[str, Side] = {GENERATE: partial(by_generate, stock, tokenizer)}
    for name, settings in SIDES.items():
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
    return report(options, device, tasks, texts, seconds)


def build_tasks(options: Options, tokenizer: PreTrainedTokenizerBase) -> dict[str, Examples]:
    """The examples of each task, in the order in which an evaluation runs them."""
    length = options.length
    if options.run_on:  # the toy sizes leave less room for the answer
        length -= RULER_TOKENS - TOY_SIZES.answer_tokens
    settings = niah.Settings(lengths=(length,), samples=options.samples)
    tasks = {}
    for task in niah.list_tasks(settings):
        try:
            built = niah.build_examples(settings, task, tokenizer)
        except LeftOutError as error:
            say(f"skipped: {error}")
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


def by_generator(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: GenerationSettings,
    examples: Examples,
) -> dict[Key, str]:
    generations = Generator(model, tokenizer, settings).generate(examples)
    return {generation.key: generation.text for generation in generations}


def report(
    options: Options,
    device: torch.device,
    tasks: dict[str, Examples],
    texts: dict[str, dict[Key, str]],
    seconds: dict[str, list[float]],
) -> list[Row]:
    examples = [pair for members in tasks.values() for pair in members]
    scores = {
        name: [string_match_all(by_key[key], example.answers) for key, example in examples]
        for name, by_key in texts.items()
    }
    what = f"NIAH at {short(options.length)}, " + ("128 tokens" if options.run_on else "to the end")
    rows: list[Row] = []
    for name in texts:
        row = {
            "name": f"{what}, {name}: faster than generate",
            "value": speedup(seconds[GENERATE], seconds[name]),
            "unit": "x",
            "side": name,
            "seconds_an_example": median(seconds[name]) / len(examples),
            "score": 100 * sum(scores[name]) / len(examples),
            "differing": sum(map(operator.ne, scores[name], scores[GENERATE])),
        }
        if name == EVERYTHING and options.run_on:
            row["at_least"] = TARGET
        rows.append(row)
    show_rows(
        f"{options.model}, {what}, {len(examples)} examples, {describe_device(device)}",
        rows,
        {
            "side": "side",
            "s/example": "seconds_an_example:.3f",
            "speed-up": "value:.2f",
            "score": "score:.1f",
            "different scores": "differing",
        },
    )
    differing = sum(row["differing"] for row in rows)
    name = f"{what}: scores that differ"
    return [*rows, {"name": name, "value": differing, "unit": "", "at_most": 0}]
