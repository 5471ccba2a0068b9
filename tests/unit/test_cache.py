"""The caches of a hybrid: what they hold, and that pieces give what the whole gives."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel, StaticCache

from bosch.attention.cache import CACHE, HybridLayer, hybridize_cache, kv_bytes
from bosch.hybrid.conversion import deploy
from bosch.run.errors import UserError
from bosch.sink import NO_SINK, Sink
from tests.model_factory import MIXED, assert_close, kv_entries, random_tokens, tiny_model

row = pytest.mark.ecosystem
NUM_FULL = [sum(row) for row in MIXED]  # of 4 groups
MASKS = {"mixed": MIXED, "all windowed": [[0] * 4] * 3, "all full": [[1] * 4] * 3}
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "bare": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config, max_cache_len=64),
}


def hybrid(window_tokens: int, z: object = MIXED) -> PreTrainedModel:
    return deploy(tiny_model("qwen3"), z, window_tokens)  # type: ignore[arg-type]


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor, cache: object = None) -> object:
    return model(ids, **{CACHE: cache}, use_cache=True)


def test_after_a_prompt_exactly_the_needed_entries_are_alive() -> None:
    for window_tokens in (1, 2, 16, 64):
        model = hybrid(window_tokens)
        for length in sorted({1, 7, window_tokens, window_tokens + 1, 70, 400}):
            cache = read(model, random_tokens(1, length))[CACHE]
            expected = [n * length + (4 - n) * min(length, window_tokens - 1) for n in NUM_FULL]
            assert kv_entries(cache) == expected
            assert kv_bytes(cache) == sum(expected) * 2 * 16 * 4  # keys, values; heads; float32


def test_a_long_prompt_leaves_no_hidden_copy() -> None:
    """Memory, not only views: the rolling part may keep some spare room, never the prompt."""
    model, length = hybrid(16), 3000
    cache = read(model, random_tokens(1, length))[CACHE]
    for layer in cache.layers:
        for x in (layer.window.keys, layer.window.values):
            assert x.untyped_storage().nbytes() == x.shape[1] * 15 * 16 * 4


# Without a group on the window its size is nothing.
SHAPES = [("mixed", 1), *product(("mixed", "all windowed"), (2, 16)), ("all full", 2)]


@pytest.mark.parametrize(
    ("kind", "z", "window_tokens"),
    [
        *((kind, *shape) for kind in ("dynamic", "static") for shape in SHAPES),
        ("bare", "mixed", 2),
        *(
            pytest.param("bare", *shape, marks=pytest.mark.slow)
            for shape in SHAPES
            if shape != ("mixed", 2)
        ),
        *(pytest.param(kind, "all windowed", 1, marks=pytest.mark.slow) for kind in CACHES),
    ],
)
def test_any_pieces_give_the_logits_of_the_whole(window_tokens: int, kind: str, z: str) -> None:
    model = hybrid(window_tokens, MASKS[z]).double()
    ids = random_tokens(2, 60)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for pieces in ([60], [1] * 60, [15, 16, 17, 12], [7, 1, 1, 30, 2, 19]):
            cache = CACHES[kind](model.config)
            parts = [read(model, piece, cache).logits for piece in ids.split(pieces, dim=1)]
            assert_close(torch.cat(parts, dim=1), whole, 1e-10)
            assert isinstance(cache.layers[0], HybridLayer)


@torch.no_grad()
def test_a_plain_cache_with_content_and_one_of_inference_mode_are_right_too() -> None:
    plain, ids = tiny_model("qwen3").double(), random_tokens(1, 40)
    full, mixed, filled = deploy(plain, MASKS["all full"], 8), hybrid(8), DynamicCache()
    plain(ids[:, :25], **{CACHE: filled})  # the same model: every group is full
    with torch.inference_mode():
        made = mixed(ids[:, :25])[CACHE]
    for model, cache in ((full, filled), (mixed, made)):
        rest = model(ids[:, 25:], **{CACHE: cache}).logits
        assert_close(rest, model(ids).logits[:, 25:])


@row("model.model: a static cache for the base model alone", "refused", "Call the whole model.")
@pytest.mark.parametrize("first", [1, 10, 30])
@torch.no_grad()
def test_a_static_cache_is_for_the_whole_model_not_its_base_alone(first: int) -> None:
    model, ids = hybrid(8), random_tokens(1, 30)
    cache = StaticCache(model.config, max_cache_len=40)
    for piece in (ids[:, :first], ids[:, :1]):  # as long as a slot is empty: it may count as text
        with pytest.raises(UserError, match="static cache"):
            model.model(piece, **{CACHE: cache})
    exact = StaticCache(model.config, max_cache_len=30)  # no slot stays empty
    both = (model.model(ids, **{CACHE: x}).last_hidden_state for x in (exact, None))
    assert torch.equal(*both)


class Waits(TorchDispatchMode):
    """How often the host reads a number of a tensor, for which it would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [0, 7])
def test_first_tokens_let_no_step_of_decoding_wait_for_the_gpu(kind: str, padding: int) -> None:
    """No more often than without a sink. (Masks are looked at once a step.)"""
    counts, ids, mask = [], random_tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, :padding] = 0
    for sink in (NO_SINK, Sink("tokens", 3)):
        model = deploy(tiny_model("qwen3"), MIXED, 8, sink)
        cache = CACHES[kind](model.config)
        model(ids[:, :20], attention_mask=mask[:, :20], **{CACHE: cache})
        for position in range(20, 30):
            with torch.no_grad(), Waits() as waits:
                now = {"attention_mask": mask[:, : position + 1], CACHE: cache}
                model(ids[:, position, None], **now)
            counts.append(waits.count)
    assert counts[10:] == counts[:10]


@torch.no_grad()
def test_a_text_that_begins_in_a_later_piece_keeps_its_first_tokens() -> None:
    """Also after rows were taken out, and after the cache was emptied for a text that begins
    elsewhere."""
    model = deploy(tiny_model("qwen3").double(), MIXED, 8, Sink("tokens", 3))
    ids, mask = random_tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[0, :21] = 0

    def check(cache: DynamicCache, row: int, start: int, until: int) -> None:
        found = held_first(cache)
        alone = read(model, ids[row : row + 1, start:until])[CACHE]
        for ours, theirs in zip(found, held_first(alone), strict=True):
            assert_close(ours[-1:], theirs, 1e-10)

    def held_first(cache: DynamicCache) -> list[Tensor]:
        return [x.first.keys for x in cache.layers if x.first is not None]

    def go_on(cache: DynamicCache, until: int, rows: list[int]) -> None:
        begin, places = cache.get_seq_length(), (mask.cumsum(1) - 1).clamp_min(0)
        now = {"position_ids": places[rows, begin:until], CACHE: cache}
        model(ids[rows, begin:until], attention_mask=mask[rows, :until], **now)

    cache = DynamicCache(config=model.config)
    for until in (10, 15, 22, 23, 40):
        go_on(cache, until, [1, 0])
    check(cache, 0, 21, 40)
    cache.batch_select_indices(torch.tensor([1]))
    go_on(cache, 41, [0])
    check(cache, 0, 21, 41)
    cache.reset()
    mask[0, :21] = 1
    mask[0, :5] = 0
    go_on(cache, 30, [0])
    check(cache, 0, 5, 30)


def test_gradients_flow_through_a_cache() -> None:
    model, ids = hybrid(8).double(), random_tokens(1, 30)
    cache = DynamicCache(config=model.config)
    pieces = [model(x, **{CACHE: cache}).logits for x in ids.split([11, 1, 18], dim=1)]
    whole, weight = model(ids, use_cache=False).logits, model.model.embed_tokens.weight
    parts = torch.cat(pieces, dim=1)
    expected, got = (torch.autograd.grad(x.sum(), weight)[0] for x in (whole, parts))
    assert_close(got, expected, 1e-9)


@pytest.mark.parametrize("window_tokens", [1, 2, 16])
def test_rows_that_were_taken_out_go_on_as_by_themselves(window_tokens: int) -> None:
    """All windowed: with a window of one token such a cache holds nothing, but has its rows."""
    model = hybrid(window_tokens, MASKS["all windowed"]).double()
    ids, following = random_tokens(3, 20), random_tokens(1, 2, seed=1)
    for chosen, change in (
        ([2], lambda cache: cache.batch_select_indices(torch.tensor([2]))),
        ([2, 2, 0], lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0]))),
        ([0, 0, 1, 1, 2, 2], lambda cache: cache.batch_repeat_interleave(2)),
    ):
        cache = read(model, ids)[CACHE]
        read(model, random_tokens(3, 1, seed=2), cache)  # into a buffer with room
        change(cache)
        expected = read(model, ids[chosen])[CACHE]
        read(model, random_tokens(3, 1, seed=2)[chosen], expected)
        for token in following.expand(len(chosen), -1).split(1, dim=1):
            found = read(model, token, cache).logits
            torch.testing.assert_close(found, read(model, token, expected).logits)


def test_a_cache_of_another_window_is_refused() -> None:
    model = hybrid(16)
    cache = read(model, random_tokens(1, 20))[CACHE]
    model.config.bosch["window"] = 8
    with pytest.raises(UserError, match=r"16 tokens.* 8 now"):
        read(model, random_tokens(1, 1), cache)
    cache = read(model, random_tokens(1, 20))[CACHE]
    assert kv_entries(cache) == [n * 20 + (4 - n) * 7 for n in NUM_FULL]


@row("generate: a quantized KV cache (optimum-quanto)", "works", "The full groups are quantized.")
def test_a_quantized_cache_quantizes_the_full_part_at_the_dense_models_cost() -> None:
    how = "pip install optimum-quanto && python -m pytest -n 0 -m ecosystem -k quantized"
    pytest.importorskip("optimum.quanto", reason=how)
    from transformers import QuantizedCache

    ids, first = random_tokens(1, 200), 152  # quanto wants whole groups of 64 values

    def error(model: PreTrainedModel) -> float:
        cache = QuantizedCache(backend="quanto", config=model.config, nbits=4)
        if hasattr(model.config, "bosch"):
            hybridize_cache(cache, model.config, NO_SINK)
            assert cache.layers[0].window is not None
        begin = read(model, ids[:, :first], cache).logits  # attended as it is
        assert torch.equal(begin, read(model, ids[:, :first]).logits)
        lossy = read(model, ids[:, first:], cache).logits
        exact = read(model, ids).logits[:, first:]
        return float((lossy - exact).norm() / exact.norm())

    assert 0 < error(hybrid(16)) < 1.5 * error(tiny_model("qwen3"))
