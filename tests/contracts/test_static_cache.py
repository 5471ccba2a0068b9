"""A static cache gives the tokens of the rolling one, by steps that are one graph."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel, StaticCache

from bosch.attention.cache import CACHE
from bosch.attention.documents import MASK_TYPE
from bosch.hybrid.conversion import deploy
from bosch.hybrid.sinks import measure_static_sink
from bosch.masks.mask import spread_mask
from bosch.run.errors import UserError
from bosch.sink import Sink
from tests.model_factory import FAMILIES, USUAL, random_tokens, tiny_model
from tests.unit.test_cache import Waits

PROMPT, NEW, LAYERS, GROUPS = 24, 14, 3, 4
SINKS = ("none", "static", "tokens=3")
WINDOWS = (8, 30, 64)  # of which the prompt, or the answer, or nothing is longer
RATIOS = (0.5, 0.75, 1.0)
BATCHES = {"one": (1, 1), "8, padded": (8, 1), "beams": (1, 3), "8, padded, beams": (8, 3)}
BY_DEFAULT = ("qwen3", "static", 0.75, 8, "8, padded")


def hybrid(family: str, sink: str, ratio: float, window_tokens: int) -> PreTrainedModel:
    """In float64: in float32 two tokens can lead by less than rounding."""
    model = tiny_model(family).double()
    texts = list(random_tokens(3, 5, seed=3))
    of_model = measure_static_sink(model, texts) if sink == "static" else Sink.parse(sink)
    made = deploy(model, spread_mask(ratio, LAYERS, GROUPS), window_tokens, of_model)
    made.generation_config.pad_token_id = 0
    return made


def some_of_the_product() -> list[Any]:
    """Each value of each axis once; the whole product, and the other families, in `make slow`."""
    axes: Any = (USUAL, SINKS, RATIOS, WINDOWS, tuple(BATCHES))
    one_changed = {
        (*BY_DEFAULT[:axis], value, *BY_DEFAULT[axis + 1 :])
        for axis, values in enumerate(axes)
        for value in values
    }
    others = [(family, *BY_DEFAULT[1:]) for family in FAMILIES if family not in USUAL]
    # Sinks differ in what padding does to them.
    fast = one_changed | {("qwen3", "tokens=3", 0.75, 30, "8, padded, beams")}
    return [
        pytest.param(*case, marks=() if case in fast else pytest.mark.slow)
        for case in [*product(*axes), *others]
    ]


@pytest.mark.parametrize(("family", "sink", "ratio", "window", "batch"), some_of_the_product())
def test_static_and_rolling_caches_give_the_same_tokens(
    family: str, sink: str, ratio: float, window: int, batch: str
) -> None:
    model, (rows, beams) = hybrid(family, sink, ratio, window), BATCHES[batch]
    ids, mask = padded(rows)
    options = {"max_new_tokens": NEW, "do_sample": False, "num_beams": beams}
    options |= {"attention_mask": mask, "disable_compile": True}
    expected = model.generate(ids, **options)
    found = model.generate(ids, **options, cache_implementation="static")
    assert torch.equal(found, expected)


def padded(rows: int) -> tuple[Tensor, Tensor]:
    """Texts of other lengths than their neighbors, padded on the left."""
    ids, mask = random_tokens(rows, PROMPT), torch.ones(rows, PROMPT, dtype=torch.long)
    for row in range(1, rows):
        mask[row, : 2 * row] = 0
    return ids * mask, mask


@pytest.mark.parametrize(
    ("sink", "rows", "tokens"),
    [
        ("static", 3, 101),
        *(pytest.param(*case, 301, marks=pytest.mark.slow) for case in product(SINKS, (1, 3))),
    ],
)
def test_many_tokens_are_one_graph_and_compiled_once(sink: str, rows: int, tokens: int) -> None:
    """Over several windows, and from a prompt shorter than one on."""
    model, graphs = hybrid("qwen3", sink, 0.75, 30), list[Any]()

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = CompileConfig(backend=count, mode=None, fullgraph=True)
    compiled._compile_all_devices = True  # else generate compiles on GPUs only
    (ids, mask), options = padded(rows), {"max_new_tokens": tokens, "do_sample": False}
    options |= {"cache_implementation": "static", "compile_config": compiled}
    found = model.generate(ids, attention_mask=mask, **options)
    assert found.shape == (rows, PROMPT + tokens)
    assert len(graphs) == 1


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("sink", SINKS)
@torch.no_grad()
def test_a_step_can_be_captured(sink: str, is_padded: bool) -> None:
    """A CUDA graph is replayed at the same addresses, and nothing may wait for the GPU."""
    model, room = hybrid("qwen3", sink, 0.75, 8), PROMPT + NEW
    (ids, mask), cache = padded(2 if is_padded else 1), StaticCache(model.config, room)
    mask = torch.nn.functional.pad(mask, (0, NEW)).to(MASK_TYPE)
    model(ids, attention_mask=mask[:, :PROMPT], **{CACHE: cache})
    token, addresses = ids[:, -1:], set[tuple[int, ...]]()
    for column in range(PROMPT, room):
        mask[:, column] = 1
        more = {"attention_mask": mask[:, None, None]} if is_padded else {}
        positions = mask.sum(1, keepdim=True).long() - 1
        with Waits() as waits:
            model(token, position_ids=positions, **{CACHE: cache}, **more)
        assert waits.count == 0
        parts = [part for layer in cache.layers for part in layer.parts]
        addresses.add(tuple(x.data_ptr() for part in parts for x in (part.keys, part.values)))
    assert len(addresses) == 1


def test_a_static_cache_that_is_used_again_has_the_sinks_of_now() -> None:
    model, ids = hybrid("qwen3", "static", 0.75, 8), random_tokens(1, PROMPT)
    cache, found = StaticCache(model.config, PROMPT + NEW), []
    for _ in range(2):
        cache.reset()
        with torch.no_grad():
            for piece in ids.split([20, 1, 1, 1, 1], dim=1):
                last = model(piece, **{CACHE: cache}).logits
            assert torch.allclose(last[:, -1], model(ids, use_cache=False).logits[:, -1])
        found.append(last)
        model.model.layers[0].self_attn.window_sink_value.data += 1
    assert not torch.allclose(*found)


@pytest.mark.parametrize(("tokens", "remove"), [(8, 3), (20, 1), (20, 2), (20, 4), (20, 20)])
def test_tokens_are_removed_while_the_window_has_what_was_before(tokens: int, remove: int) -> None:
    """A window of 8, whose slots the removed tokens may have taken. Layer 0 is all full."""
    z = [[1] * GROUPS, *spread_mask(0.75, LAYERS, GROUPS)[1:]]
    model, ids = deploy(tiny_model("qwen3").double(), z, 8), random_tokens(1, 30)
    cache, left = StaticCache(model.config, 40), tokens - remove
    with torch.no_grad():
        model(torch.cat([ids[:, :left], ids[:, -remove:]], dim=1), **{CACHE: cache})
        if 1 < remove < tokens and tokens > 8:
            with pytest.raises(UserError, match=f"cannot remove {remove} tokens"):
                cache.crop(-remove)
            assert int(cache.get_seq_length()) == tokens
            return
        cache.crop(-remove)
        found = [model(ids[:, at : at + 1], **{CACHE: cache}).logits for at in range(left, 30)]
        assert torch.allclose(torch.cat(found, 1), model(ids, use_cache=False).logits[:, left:])
