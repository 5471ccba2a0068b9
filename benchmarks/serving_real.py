"""A trained dense model and its hybrid in vLLM: the same answers, more texts at once.

    .venv-serving/bin/python -m benchmarks serving_real --dense runs/real/model \\
        --hybrid runs/real/run/train/step-000150 --folder runs/real

answers  needle prompts that vLLM and transformers both continue with the hybrid: equal tokens
memory   bytes of KV blocks that one long text holds at its end, as a share of the dense model's
load     many requests at once in a cache that holds a few dense texts: tokens/s, seconds to the
         first token, the most requests that run at once; sides alternate

In fp32. Needs vLLM, which .venv-serving has; it has run on CPUs only.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks._measure import DeviceOptions, Row, speedup
from bosch.eval.engine_vllm import EngineGenerator, check_engine, start_engine
from bosch.eval.generate import Generator
from bosch.eval.settings import GenerationSettings
from bosch.eval.suites import niah
from bosch.eval.suites._interface import LeftOutError
from bosch.hybrid.conversion import head_size
from bosch.model import load_tokenizer
from bosch.run.errors import UserError
from bosch.training.model_start import read_config

SIDES = ("dense", "hybrid")
LAST = 8  # new tokens after the long text: what has left the windows is freed with the next one
BLOCK = 32  # tokens of a block of vLLM's cache, on CPUs
COLUMNS = {
    **{name: name for name in ("name", "value", "unit")},
    "x dense": "times_dense",
    "first, s": "first_token",
    "at once": "most_running",
}


@dataclass(frozen=True)
class Options(DeviceOptions):
    dense: Path = Path("runs/real/model")  # folder of the dense model
    hybrid: Path = Path("runs/real/run/model")  # folder of the hybrid
    folder: Path = Path("runs/real")  # made by launch/fetch_real_model.py: texts
    prompts: int = 20  # needle prompts that both engines continue
    prompt_tokens: int = 1_024  # of each
    long: int = 8_000  # tokens of the text whose memory is measured
    requests: int = 32  # given at once
    length: int = 2_000  # tokens of each request
    new: int = 32  # tokens that each request generates
    room: int = 6  # dense texts of a request's length that the cache holds
    rounds: int = 3  # how often each side answers all requests

    @property
    def title(self) -> str:
        return f"{self.hybrid}, {self.place}"


def measure(options: Options) -> Iterator[Row]:
    check_engine()
    options.start()
    tokenizer = load_tokenizer(str(options.dense))
    config = read_config(options.dense)
    token_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * head_size(config)
    blocks = -(-(options.length + options.new) // BLOCK) + 1  # a text may not fill its last block
    cache_bytes = max(options.room * blocks, -(-options.long // BLOCK) + 2) * BLOCK * token_bytes
    longest = max(options.long + LAST, options.prompt_tokens, options.length + options.new)
    if longest > config.max_position_embeddings:
        problem = f"{options.dense} has {config.max_position_embeddings:,} positions"
        raise UserError(f"{problem}, too few for texts of {longest:,} tokens.")
    folders = zip(SIDES, (options.dense, options.hybrid), strict=True)
    engines = {side: Engine(folder, cache_bytes, longest) for side, folder in folders}
    only_load = dict.fromkeys(("times_dense", "first_token", "most_running"))
    yield compare_answers(engines["hybrid"].llm, tokenizer, options) | only_load

    lines = (options.folder / "text" / "held_out.jsonl").read_text("utf-8").splitlines()
    ids = [i for line in lines for i in tokenizer(json.loads(line)["text"])["input_ids"]]
    needed = max(options.long, options.requests * options.length)
    if len(ids) < needed:
        raise UserError(f"{options.folder}/text: {len(ids):,} tokens of text, {needed:,} needed.")

    held = {side: e.answer([ids[: options.long]], LAST).held_bytes for side, e in engines.items()}
    yield {
        "name": f"KV bytes of {options.long:,} tokens",
        "value": round(held["hybrid"] / held["dense"], 3),
        "unit": "of dense",
        **only_load,
        **{f"{side}_bytes": number for side, number in held.items()},
    }

    texts = [ids[i * options.length : (i + 1) * options.length] for i in range(options.requests)]
    answers: dict[str, list[Answer]] = {side: [] for side in SIDES}
    for _ in range(options.rounds):
        for side, engine in engines.items():
            answers[side].append(engine.answer(texts, options.new))
    seconds = {side: [each.seconds for each in found] for side, found in answers.items()}
    for side, found in answers.items():
        yield {
            "name": f"{options.requests} x {options.length:,} tokens, {side}",
            "value": round(
                options.requests * (options.length + options.new) / median(seconds[side])
            ),
            "unit": "tokens/s",
            "times_dense": round(speedup(seconds["dense"], seconds[side]), 2),
            "first_token": round(median(each.first_token for each in found), 1),
            "most_running": max(each.most_running for each in found),
            "cache_bytes": cache_bytes,
            "seconds": seconds[side],
        }


def compare_answers(engine: Any, tokenizer: Any, options: Options) -> Row:
    """How many needle prompts the hybrid continues with the same tokens in both."""
    essays = str(options.folder / "text" / "essays.json")
    settings = niah.Settings(essays, lengths=(options.prompt_tokens,), samples=options.prompts)
    found: dict[str, list[Any]] = {}
    for task in niah.list_tasks(settings):
        with suppress(LeftOutError):  # its shortest text is longer than that
            found[task.name] = niah.build_examples(settings, task, tokenizer, options.prompts)
    pairs = [((name, 0, each.index), each) for name, some in found.items() for each in some]
    examples = pairs[:: len(found)][: options.prompts]
    plain = GenerationSettings()
    model = AutoModelForCausalLM.from_pretrained(
        options.hybrid, dtype=torch.float32, trust_remote_code=False
    ).eval()
    ours = {j.key: j.tokens for j in Generator(model, tokenizer, plain).generate(examples)}
    vllm = EngineGenerator(engine, tokenizer, plain, None)
    theirs = {j.key: j.tokens for j in vllm.generate(examples)}
    equal = sum(tokens == theirs[key] for key, tokens in ours.items())
    return {
        "name": "needle prompts, same answer",
        "value": equal,
        "unit": f"of {len(examples)}",
        "tokens": sum(map(len, ours.values())),
    }


@dataclass(frozen=True)
class Answer:
    """How an engine did some requests that it got at once."""

    seconds: float
    first_token: float  # median over requests, in seconds
    most_running: int
    held_bytes: float  # of KV blocks, at the last step


class Engine:
    def __init__(self, folder: Path, cache_bytes: int, max_tokens: int) -> None:
        self.llm = start_engine(
            folder,
            dtype="float32",
            max_model_len=max_tokens,
            enable_prefix_caching=False,  # the same prompts come again
            kv_cache_memory_bytes=cache_bytes,
        )
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        caches = core.model_executor.driver_worker.worker.model_runner.kv_caches
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in caches}
        total_bytes = sum(storage.nbytes() for storage in storages.values())
        self.block_bytes = total_bytes / self.scheduler.kv_cache_config.num_blocks
        self.round = 0

    def answer(self, prompts: Sequence[list[int]], new: int) -> Answer:
        from vllm import SamplingParams  # check_engine says so where it is missing

        how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        self.round += 1  # names of requests are used once
        for number, prompt in enumerate(prompts):
            name = f"{self.round}-{number}"
            self.engine.add_request(name, {"prompt_token_ids": prompt}, how)
        pool = self.scheduler.kv_cache_manager.block_pool
        began, free = time.perf_counter(), pool.get_num_free_blocks()
        firsts: dict[str, float] = {}
        held, most_running = 0, 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                firsts.setdefault(output.request_id, time.perf_counter() - began)
            if self.scheduler.running:
                held = free - pool.get_num_free_blocks()
            most_running = max(most_running, len(self.scheduler.running))
        seconds = time.perf_counter() - began
        return Answer(seconds, median(firsts.values()), most_running, held * self.block_bytes)
