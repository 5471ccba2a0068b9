"""Generating in batches, with beams and stop strings, compiled, and on from a cache. Other ways:
tests/contracts/test_memory_saved.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    PreTrainedModel,
    pipeline,
)

from bosch.assets import asset_folder
from bosch.hybrid.cache import CACHE
from bosch.hybrid.conversion import deploy
from tests.model_factory import FAMILIES, MIXED, generate_anew, random_tokens, tiny_model

row = pytest.mark.ecosystem
WINDOW = 16
NEW_TOKENS = 12


def hybrid(family: str = "qwen3") -> PreTrainedModel:
    model = deploy(tiny_model(family), MIXED, WINDOW)
    model.generation_config.pad_token_id = 0
    return model


def generate(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    defaults = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS}
    out: Tensor = model.generate(ids, **(defaults | {"do_sample": False} | kwargs))
    return out


def test_generating_goes_on_from_a_cache() -> None:
    model, ids = hybrid(), random_tokens(1, 50)
    first: Any = generate(model, ids, max_new_tokens=5, return_dict_in_generate=True)
    rest = {CACHE: first[CACHE], "max_new_tokens": NEW_TOKENS - 5}
    found = generate(model, first.sequences, **rest)
    assert torch.equal(found, generate_anew(model, ids, NEW_TOKENS))


@row("generate: left-padded batches", "works", "Also in chunks and with a static cache.")
@pytest.mark.parametrize(
    "kwargs", [{}, {"prefill_chunk_size": 7}, {"cache_implementation": "static"}]
)
def test_left_padded_batches_give_the_tokens_of_each_row_alone(kwargs: dict[str, Any]) -> None:
    model, ids = hybrid(), random_tokens(3, 40)
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :11] = attention_mask[1, :39] = 0
    out = generate(model, ids, attention_mask=attention_mask, disable_compile=True, **kwargs)
    for row, num_padding in enumerate((11, 39, 0)):
        alone = generate_anew(model, ids[row : row + 1, num_padding:], NEW_TOKENS)
        assert torch.equal(out[row, num_padding:], alone[0])


@row("generate: beams, samples", "works", "")
@pytest.mark.parametrize(
    "kwargs",
    [{"num_beams": 3}, {"do_sample": True, "top_k": 20}, {"num_beams": 2, "do_sample": True}],
)
def test_beams_and_samples_are_those_without_a_cache(kwargs: dict[str, Any]) -> None:
    model, ids = hybrid(), random_tokens(2, 30)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        results.append(generate(model, ids, use_cache=use_cache, **kwargs))
    assert torch.equal(*results)


def test_logits_of_a_prompt_are_those_of_its_last_token() -> None:
    model = hybrid()
    rows: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    generate(model, random_tokens(1, 40))
    assert rows == [1] * NEW_TOKENS


@row("generate, pipeline: stop strings", "works", "")
def test_stop_strings_of_generate_and_pipelines_end_the_text() -> None:
    folder = asset_folder("tiny-qwen3-2layer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = model.config.num_key_value_heads
    model = deploy(model, [[0] * groups, [1] * groups], WINDOW)
    ids = tokenizer("The city of", return_tensors="pt").input_ids
    settings = {"max_new_tokens": 20, "do_sample": False}
    text = tokenizer.decode(model.generate(ids, **settings)[0])
    stop = text.split()[6]
    shorter = model.generate(ids, stop_strings=[stop], tokenizer=tokenizer, **settings)
    end = text.index(stop, len("The city of")) + len(stop)
    assert tokenizer.decode(shorter[0]) == text[:end]
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (written,) = writer("The city of", stop_strings=[stop], tokenizer=tokenizer, **settings)
    assert written["generated_text"] == text[:end]


@row("generate: `torch.compile`", "works", "With a static cache.")
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_static_cache_gives_the_recomputed_tokens_in_two_graphs(family: str) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model, ids = hybrid(family), random_tokens(1, 30)
    model.config._experts_implementation = "batched_mm"  # the plain loop over experts breaks graphs
    torch.compiler.reset()
    settings = CompileConfig(backend=count, mode=None, fullgraph=True)
    settings._compile_all_devices = True  # else generate compiles on GPUs only
    out = generate(model, ids, cache_implementation="static", compile_config=settings)
    assert torch.equal(out, generate_anew(model, ids, NEW_TOKENS))
    assert 1 <= len(graphs) <= 2
