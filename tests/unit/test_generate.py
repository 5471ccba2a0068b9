"""Every lossless way to generate gives the tokens of recomputation without a cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
    pipeline,
)

from bosch.assets import asset_folder
from bosch.hybrid.cache import CACHE, HybridLayer
from bosch.hybrid.conversion import deploy
from tests.model_factory import FAMILIES, MIXED, random_tokens, tiny_model

WINDOW = 16
NEW_TOKENS = 12


def hybrid(family: str = "qwen3", window_tokens: int = WINDOW, z: Any = MIXED) -> PreTrainedModel:
    model = deploy(tiny_model(family), z, window_tokens)
    model.generation_config.pad_token_id = 0
    return model


@torch.no_grad()
def recomputed(model: PreTrainedModel, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Greedy tokens, each from a forward pass over the whole text before it, without a cache."""
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    for _ in range(NEW_TOKENS):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return ids


def generate(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    defaults = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS}
    out: Tensor = model.generate(ids, **(defaults | {"do_sample": False} | kwargs))
    return out


Way = Callable[[PreTrainedModel, Tensor], Tensor]


STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}


def by(**options: Any) -> Way:
    return lambda model, ids: generate(model, ids, **options)


def own_dynamic_cache(model: PreTrainedModel, ids: Tensor) -> Tensor:
    cache = DynamicCache()
    out = generate(model, ids, **{CACHE: cache})
    assert isinstance(cache.layers[0], HybridLayer)  # replaced by ours, which saves memory
    return out


def own_static_cache(model: PreTrainedModel, ids: Tensor) -> Tensor:
    cache = StaticCache(model.config, max_cache_len=ids.shape[1] + NEW_TOKENS)
    return generate(model, ids, **{CACHE: cache}, disable_compile=True)


def continued(model: PreTrainedModel, ids: Tensor) -> Tensor:
    first: Any = generate(model, ids, max_new_tokens=5, return_dict_in_generate=True)
    cache, more = first[CACHE], NEW_TOKENS - 5
    return generate(model, first.sequences, **{CACHE: cache}, max_new_tokens=more)


def assisted(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The assistant is often wrong, so its tokens are removed from both caches again."""
    assistant = hybrid(model.config.model_type.removeprefix("bosch_"), window_tokens=5)
    with torch.no_grad():
        for weights, theirs in zip(assistant.parameters(), model.parameters(), strict=True):
            weights.copy_(theirs + 0.02 * torch.randn_like(theirs))
    return generate(model, ids, assistant_model=assistant)


WAYS: dict[str, Way] = {
    "dynamic": generate,
    "chunks of 7": by(prefill_chunk_size=7),
    "chunks of 16": by(prefill_chunk_size=16),
    "static": by(**STATIC),
    "static in chunks": by(**STATIC, prefill_chunk_size=7),
    "own dynamic cache": own_dynamic_cache,
    "own static cache": own_static_cache,
    "continued": continued,
    "assisted": assisted,
    "assisted by itself": lambda model, ids: generate(model, ids, assistant_model=model),
    "prompt lookup": by(prompt_lookup_num_tokens=3),
}


@pytest.mark.ecosystem(
    "generate: static and dynamic caches, prefill in chunks, prompt lookup",
    "works",
    "The same tokens as without a cache.",
)
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 50])
@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_way_gives_the_recomputed_tokens(way: str, length: int) -> None:
    model, ids = hybrid(), random_tokens(1, length)
    assert torch.equal(WAYS[way](model, ids), recomputed(model, ids))


@pytest.mark.ecosystem(
    "generate: left-padded batches", "works", "Also in chunks and with a static cache."
)
@pytest.mark.parametrize(
    "kwargs", [{}, {"prefill_chunk_size": 7}, {"cache_implementation": "static"}]
)
def test_left_padded_batches_give_the_tokens_of_each_row_alone(kwargs: dict[str, Any]) -> None:
    model, ids = hybrid(), random_tokens(3, 40)
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :11] = 0
    attention_mask[1, :39] = 0
    out = generate(model, ids, attention_mask=attention_mask, disable_compile=True, **kwargs)
    assert torch.equal(out, recomputed(model, ids, attention_mask))
    for row, num_padding in enumerate((11, 39, 0)):
        alone = recomputed(model, ids[row : row + 1, num_padding:])
        assert torch.equal(out[row, num_padding:], alone[0])


@pytest.mark.ecosystem("generate: beams, samples", "works", "")
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


@torch.no_grad()
def test_arguments_may_come_by_position() -> None:
    model, ids = hybrid(), random_tokens(1, 40)
    cache = DynamicCache(config=model.config)
    out = model(ids, None, None, cache)
    assert out[CACHE] is cache
    assert isinstance(cache.layers[0], HybridLayer)
    assert torch.equal(out.logits, model(ids, use_cache=False).logits)


@pytest.mark.ecosystem("generate, pipeline: stop strings", "works", "")
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


@pytest.mark.ecosystem("generate: `torch.compile`", "works", "With a static cache.")
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
    assert torch.equal(out, recomputed(model, ids))
    assert 1 <= len(graphs) <= 2
