"""A static sink is one rule: in search and hybrid, in pieces and as a whole, in any family."""

import copy
import functools
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)

from bosch.attention.backends import sdpa
from bosch.attention.cache import CACHE, allocated_bytes, hybridize_cache, kv_bytes
from bosch.attention.call import AttentionCall
from bosch.attention.sink_keys import keys_beyond
from bosch.config import TrainConfig
from bosch.hybrid.conversion import deploy, head_size
from bosch.hybrid.export import mask_record
from bosch.hybrid.materialize import materialize, unmaterialize
from bosch.hybrid.model_stage import write_hybrid
from bosch.hybrid.models import family_of
from bosch.hybrid.sinks import (
    attach_sink,
    measure_static_sink,
    read_constants,
    sink_of_hybrid,
    write_constants,
)
from bosch.masks.mask import MaskFile, read_mask, write_mask
from bosch.model import load_model
from bosch.run.errors import UserError
from bosch.sink import NO_SINK, Sink, SinkConstants
from bosch.training.model_start import make_optimizer
from tests.contracts.test_memory_saved import NEW, PROMPT, WAYS, generated
from tests.hybrid_folders import plain_folder, record_for
from tests.model_factory import (
    MIXED,
    assert_close,
    families_with,
    family_parameters,
    generate_anew,
    logits,
    packed_positions,
    random_tokens,
    same_mask,
    tiny_model,
)

WINDOW = 16
FIRST = Sink("tokens", 3)
every_family = pytest.mark.parametrize("family", family_parameters())


def model_and_sink(family: str) -> tuple[PreTrainedModel, Sink]:
    """A large one, so that it shows."""
    model = tiny_model(family).double()
    found = measure_static_sink(model, list(random_tokens(3, 5, seed=3))).known_constants()
    return model, static_sink(found.keys_LGD * 1.5, found.values_LGD * 3)


def static_sink(keys_LGD: Tensor, values_LGD: Tensor) -> Sink:
    return Sink("static", constants=SinkConstants(keys_LGD, values_LGD))


def hybrid_with(kind: str, family: str = "qwen3") -> PreTrainedModel:
    model, static = model_and_sink(family)
    return deploy(model, MIXED, WINDOW, static if kind == "static" else FIRST)


def searched(model: Any, sink: Sink, ids: Tensor, z: Any = MIXED, **more: Any) -> Tensor:
    """The logits of search mode with a sink. The model is left without."""
    attach_sink(model, sink)
    found = logits(model, ids, bosch_mask=z, bosch_window=WINDOW, use_cache=False, **more)
    attach_sink(model, NO_SINK)
    return found


def by_hand(model: PreTrainedModel, ids: Tensor, sink: Sink) -> Tensor:
    """All groups windowed: the sink as a key of its own, at a position before all others, put into
    the model's own cache; the window as a mask."""
    num_tokens = ids.shape[1]
    cache = DynamicCache(config=model.config)
    for layer, (key_GD, value_GD) in enumerate(zip(*sink.known_constants(), strict=True)):
        cache.update(key_GD[None, :, None], value_GD[None, :, None], layer)
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    window = (distance >= 0) & (distance < WINDOW)
    sees_sink = torch.arange(num_tokens)[:, None] >= WINDOW
    mask = torch.cat([sees_sink, window], 1)[None, None]
    positions = torch.arange(num_tokens)[None]
    arguments = {"attention_mask": mask, "position_ids": positions, CACHE: cache}
    return logits(model, ids, **arguments)


@every_family
def test_the_search_sees_the_sink_as_one_more_key(family: str) -> None:
    model, sink = model_and_sink(family)
    ids = random_tokens(1, 50)
    found = searched(model, sink, ids, same_mask(0, model))
    stock = tiny_model(family, attention="sdpa").double()
    assert_close(found, by_hand(stock, ids, sink), 1e-9)
    without = logits(model, ids, bosch_mask=same_mask(0, model), bosch_window=WINDOW)
    assert_close(found[:, :WINDOW], without[:, :WINDOW], 1e-9)
    assert (found - without)[:, WINDOW:].abs().amax() > 0.01


@every_family
def test_first_tokens_are_a_mask_of_the_stock_model(family: str) -> None:
    model, ids = tiny_model(family).double(), random_tokens(1, 50)
    found = searched(model, FIRST, ids, same_mask(0, model))
    distance = torch.arange(50)[:, None] - torch.arange(50)
    visible = (distance >= 0) & ((distance < WINDOW) | (torch.arange(50) < FIRST.num_tokens))
    stock = tiny_model(family, attention="sdpa").double()
    assert_close(found, logits(stock, ids, attention_mask=visible[None, None]), 1e-9)


def test_one_mask_for_all_rows_shows_each_row_its_own_first_tokens() -> None:
    hybrid, ids = hybrid_with("tokens"), random_tokens(2, 50)
    model, _ = model_and_sink("qwen3")
    shared = torch.ones(50, 50, dtype=torch.bool).tril()[None, None]
    of_each = shared.expand(2, -1, -1, -1)
    for compute in (partial(searched, model, FIRST), partial(logits, hybrid, use_cache=False)):
        one, both = (compute(ids, attention_mask=mask) for mask in (shared, of_each))
        assert_close(one, both, 1e-9)


@every_family
def test_a_full_mask_and_a_text_within_the_window_are_as_without(family: str) -> None:
    model, sink = model_and_sink(family)
    ids = random_tokens(1, 50)
    assert torch.equal(searched(model, sink, ids, same_mask(1, model)), logits(model, ids))
    short = ids[:, :WINDOW]
    expected = logits(model, short, bosch_mask=MIXED, bosch_window=WINDOW)
    assert torch.equal(searched(model, sink, short), expected)
    hybrids = deploy(model, MIXED, WINDOW, sink), deploy(model, MIXED, WINDOW)
    assert torch.equal(*(logits(hybrid, short) for hybrid in hybrids))


@pytest.mark.parametrize(("family", "kind"), families_with(["static", "tokens"], step=2))
def test_the_hybrid_is_the_searched_model(family: str, kind: str) -> None:
    model, sink = model_and_sink(family)
    sink = sink if kind == "static" else FIRST
    hybrid, ids = deploy(model, MIXED, WINDOW, sink), random_tokens(2, 90)
    padded = torch.ones(2, 90, dtype=torch.long)
    padded[0, :31] = 0
    # The sink is a key at position 0, so positions count from the first token that is no padding.
    with_padding = {"attention_mask": padded, "position_ids": (padded.cumsum(1) - 1).clamp_min(0)}
    for arguments, first in (({}, 0), (with_padding, 31)):
        expected = searched(model, sink, ids, **arguments)[:, first:]
        assert_close(logits(hybrid, ids, **arguments)[:, first:], expected, 1e-4)
    # Padding changes nothing for a row, and packed documents are as by themselves.
    alone = logits(hybrid, ids[:1, 31:])
    assert_close(logits(hybrid, ids, **with_padding)[:1, 31:], alone, 1e-4)
    packed = torch.cat([ids[:1, :40], ids[1:, :50]], 1)
    found = logits(hybrid, packed, position_ids=packed_positions(40, 50), use_cache=False)
    with_cache = logits(hybrid, packed, position_ids=packed_positions(40, 50))
    for either in (found, with_cache):
        assert_close(either[:, :40], logits(hybrid, ids[:1, :40]), 1e-4)
        assert_close(either[:, 40:], logits(hybrid, ids[1:, :50]), 1e-4)
    # Beside padding first tokens are looked for in the mask, which shows only one text's.
    padding = torch.cat([torch.zeros(1, 5), torch.ones(1, 90)], 1).long()
    padded = {"attention_mask": padding}
    padded["position_ids"] = torch.cat([torch.zeros(1, 5).long(), packed_positions(40, 50)], 1)
    row = torch.cat([ids[:1, :5], packed], 1)
    for use_cache in (False, True):
        if kind == "tokens":
            with pytest.raises(UserError, match="one text in a row"):
                logits(hybrid, row, **padded, use_cache=use_cache)
        else:
            assert_close(logits(hybrid, row, **padded, use_cache=use_cache)[:, 5:], found, 1e-4)


@pytest.mark.parametrize(
    ("family", "kind", "make_cache"),
    families_with(
        [*product(("static", "tokens"), (DynamicCache, partial(StaticCache, max_cache_len=64)))],
        step=4,
    ),
)
def test_any_pieces_give_the_logits_of_the_whole(kind: str, family: str, make_cache: Any) -> None:
    hybrid, ids = hybrid_with(kind, family), random_tokens(2, 60)
    whole = logits(hybrid, ids, use_cache=False)
    for pieces in ([1] * 60, [15, 16, 17, 12], [7, 1, 1, 30, 2, 19]):
        cache = make_cache(config=hybrid.config)
        parts = [logits(hybrid, piece, **{CACHE: cache}) for piece in ids.split(pieces, dim=1)]
        assert_close(torch.cat(parts, dim=1), whole, 1e-9)


@pytest.mark.parametrize("kind", ["static", "tokens"])
def test_a_padded_batch_decodes_like_its_texts_alone(kind: str) -> None:
    hybrid, ids, mask = hybrid_with(kind), random_tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[0, :21] = 0
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    together = hybrid.generate(ids, attention_mask=mask, **options)
    for row, start in enumerate((21, 0)):
        alone = hybrid.generate(ids[row : row + 1, start:], **options)
        assert torch.equal(together[row, start:], alone[0])


@pytest.mark.parametrize("make_cache", [DynamicCache, partial(StaticCache, max_cache_len=64)])
def test_padding_between_two_turns_hides_no_sink(make_cache: Any) -> None:
    """The first turn has left every window of the second, which is shorter than a window."""
    model, sink = model_and_sink("qwen3")
    z = same_mask(0, model)
    first, gap, second = 6, WINDOW, 8
    ids, mask = random_tokens(1, 30), torch.ones(1, 30, dtype=torch.long)
    mask[0, first : first + gap] = 0
    positions = mask.cumsum(1) - 1

    def answers(hybrid: PreTrainedModel, pieces: list[int]) -> Tensor:
        cache, parts, end = make_cache(config=hybrid.config), [], 0
        for piece in ids.split(pieces, dim=1):
            begin, end = end, end + piece.shape[1]
            more = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
            parts.append(logits(hybrid, piece, **{CACHE: cache}, **more))
        return torch.cat(parts, 1)[:, first + gap :]

    whole = answers(deploy(model, z, WINDOW, sink), [30])
    in_pieces = answers(deploy(model, z, WINDOW, sink), [first, gap, *[1] * second])
    assert_close(in_pieces, whole, 1e-9)
    without = answers(deploy(model, z, WINDOW), [30])
    assert ((whole - without).abs().amax((0, 2)) > 0.01).all()


def test_an_offloaded_cache_fetches_layers_before_their_first_tokens() -> None:
    """As transformers does: the next layer's, while the first has just begun."""
    hybrid, cache = hybrid_with("tokens"), DynamicCache()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    hybridize_cache(cache, hybrid.config, hybrid.window_sink, mask)
    starts_B = cache.layers[1].first.starts_B
    for change in (cache.layers[1].prefetch, cache.layers[1].offload):
        change()
    assert cache.layers[1].first.starts_B is starts_B


@functools.cache
def tokens_anew(kind: str) -> Tensor:
    """By recomputation, which all ways must agree with."""
    return generate_anew(hybrid_with(kind).float(), random_tokens(1, PROMPT), NEW)


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        pytest.param(way, kind, marks=() if (number + turn) % 2 == 0 else pytest.mark.slow)
        for number, way in enumerate(WAYS)
        for turn, kind in enumerate(("static", "tokens"))
    ],
)
def test_generating_gives_the_tokens_of_recomputation(way: str, kind: str) -> None:
    hybrid = hybrid_with(kind).float()
    cache = generated(hybrid, way, PROMPT, tokens_anew(kind))[CACHE]
    mask = mask_record(hybrid.config).mask
    if way == "dynamic":
        length, size = PROMPT + NEW - 1, head_size(hybrid.config)
        assert kv_bytes(cache) == mask.kv_bytes(length, size, 4)
        assert allocated_bytes(cache) <= mask.allocated_bytes(length, size, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "tokens"])
def test_compiled_steps_give_the_tokens_of_plain_ones(kind: str) -> None:
    """One graph for texts without padding, and one for all others."""
    hybrid, graphs = hybrid_with(kind).float(), []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = CompileConfig(backend=count, mode=None, fullgraph=True)
    compiled._compile_all_devices = True  # else generate compiles on GPUs only
    ids, options = random_tokens(2, 40), {"max_new_tokens": 6, "do_sample": False}
    for padding in (0, 3, 5, 0):
        mask = torch.ones(2, 40, dtype=torch.long)
        mask[0, :padding] = 0
        expected = hybrid.generate(ids, attention_mask=mask, **options)
        how = {"cache_implementation": "static", "compile_config": compiled}
        assert torch.equal(hybrid.generate(ids, attention_mask=mask, **options, **how), expected)
    assert len(graphs) <= 2


@every_family
def test_gradients_of_the_sinks_are_those_of_the_search(family: str) -> None:
    model, measured = model_and_sink(family)
    constants = SinkConstants(*(x.clone().requires_grad_() for x in measured.known_constants()))
    hybrid, ids = deploy(model, MIXED, WINDOW, measured), random_tokens(2, 50)
    attach_sink(model, static_sink(*constants))
    model(ids, labels=ids, bosch_mask=MIXED, bosch_window=WINDOW).loss.backward()
    hybrid.train()(ids, labels=ids).loss.backward()
    for layer, (row, num_full) in enumerate(
        zip(hybrid.config.bosch["permutation"], hybrid.config.bosch["num_full"], strict=True)
    ):
        attention = hybrid.model.layers[layer].self_attn
        ours = (attention.window_sink_key.grad, attention.window_sink_value.grad)
        for found, of_search in zip(ours, constants, strict=True):
            assert found.abs().max() > 0
            assert_close(found, of_search.grad[layer, row[num_full:]], 1e-4)


def test_sinks_learn_in_each_batch() -> None:
    """Also where nothing has left a window: DDP waits for a gradient of each weight."""
    hybrid, ids = hybrid_with("static").train(), random_tokens(2, WINDOW)
    hybrid(ids, labels=ids).loss.backward()
    for name, weight in hybrid.named_parameters():
        assert weight.grad is not None, name
        assert ("window_sink" in name) == (not weight.grad.any()), name
    with torch.no_grad():
        plain = deploy(tiny_model("qwen3").double(), MIXED, WINDOW)
        assert torch.equal(hybrid(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("kind", ["none", "static", "tokens"])
def test_autocast_computes_hybrids_as_it_does_dense_models(kind: str) -> None:
    """Rotary positions leave queries and keys in fp32 then, and values are in bf16."""
    model = hybrid_with(kind) if kind != "none" else deploy(tiny_model("qwen3"), MIXED, WINDOW)
    model, ids = model.float(), random_tokens(2, 50)
    expected = logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        model.train()(ids, labels=ids).loss.backward()
        whole = logits(model.eval(), ids)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            pieces = [model(x, **{CACHE: cache}).logits for x in ids.split([30, 1, 1, 18], dim=1)]
    rounding = (logits(model.bfloat16(), ids).float() - expected).abs().max()
    for found in (whole, torch.cat(pieces, dim=1)):
        assert (found.float() - expected).abs().max() < 2 * rounding
    assert all(weight.grad is not None for weight in model.parameters())


def mask_with_sinks(folder: Path, dense: Path) -> MaskFile:
    """The mask of a search with --sink static, as its stage leaves it."""
    record = record_for(dense)
    record = replace(record, mask=replace(record.mask, sink=Sink("static")))
    folder.mkdir()
    write_mask(folder / "mask.json", record)
    model = load_model(dense, torch.float32, "cpu", attn_implementation="bosch")
    write_constants(folder / "mask.json", measure_static_sink(model, list(random_tokens(2, 3))))
    return record


def constants_of(folder: Path, record: MaskFile) -> SinkConstants:
    return read_constants(folder / "mask.json", record).mask.sink.known_constants()


@pytest.mark.parametrize("shard_size", ["1GB", "40kB"])
def test_a_hybrid_has_the_masks_sinks_and_goes_back(shard_size: str, tmp_path: Path) -> None:
    dense = plain_folder(tmp_path / "dense", shard_size=shard_size)
    record = mask_with_sinks(tmp_path / "mask", dense)
    assert read_mask(tmp_path / "mask" / "mask.json") == record
    with pytest.raises(UserError, match="static sinks"):
        materialize(dense, record, tmp_path / "hybrid")
    write_hybrid(dense, tmp_path / "mask" / "mask.json", tmp_path / "hybrid")
    hybrid = load_model(tmp_path / "hybrid", "auto", "cpu")
    constants = constants_of(tmp_path / "mask", record)
    for layer, row in enumerate(MIXED):
        windowed = [group for group, bit in enumerate(row) if not bit]
        found = sink_of_hybrid(hybrid).known_constants()
        for ours, theirs in zip(found, constants, strict=True):
            assert torch.equal(ours[layer, windowed], theirs[layer, windowed])
    assert mask_record(hybrid.config).mask == record.mask
    unmaterialize(tmp_path / "hybrid", tmp_path / "again")
    first, again = (load_model(tmp_path / name, "auto", "cpu") for name in ("dense", "again"))
    weights = again.state_dict()
    assert first.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in first.state_dict().items())


def test_sinks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    dense = plain_folder(tmp_path / "dense")
    record = mask_with_sinks(tmp_path / "mask", dense)
    good, path = constants_of(tmp_path / "mask", record), tmp_path / "mask" / "sinks.safetensors"
    for keys_LGD, words in (
        (good.keys_LGD[:1], "keys_LGD is"),
        (good.keys_LGD * float("nan"), "no finite numbers"),
    ):
        write_constants(tmp_path / "mask" / "mask.json", static_sink(keys_LGD, good.values_LGD))
        with pytest.raises(UserError, match=words):
            read_constants(tmp_path / "mask" / "mask.json", record)
    path.write_bytes(b"no sinks")
    with pytest.raises(UserError, match="not a file of sinks"):
        read_constants(tmp_path / "mask" / "mask.json", record)
    path.unlink()
    with pytest.raises(UserError, match=r"sinks\.safetensors does not exist"):
        write_hybrid(dense, tmp_path / "mask" / "mask.json", tmp_path / "hybrid")


def test_a_hybrid_without_its_sinks_or_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    hybrid = hybrid_with("static").float()
    hybrid.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in weights.items() if "sink" not in n}, tmp_path / "model.safetensors")
    load_ours = partial(load_model, dtype="auto", device="cpu")
    for load in (load_ours, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(UserError, match="window_sink_key"):
            load(tmp_path)
    values = {k: v for k, v in hybrid.config.to_dict().items() if k != "bosch"}
    with pytest.raises(UserError, match="logit"):
        type(hybrid.config)(**values, bosch=hybrid.config.bosch | {"sink": {"kind": "logit"}})


def test_sinks_measured_with_other_positions_are_refused(tmp_path: Path) -> None:
    """YaRN makes keys larger. First tokens are keys of the text, which it stretches too."""
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for kind in ("static", "tokens"):
        hybrid = hybrid_with(kind)
        rope = hybrid.config.rope_parameters | stretched
        hybrid.save_pretrained(tmp_path / kind)
        load = partial(AutoModelForCausalLM.from_pretrained, tmp_path / kind)
        assert load().window_sink.kind == kind
        if kind == "tokens":
            assert load(rope_parameters=rope).model.rotary_emb.attention_scaling > 1
        else:
            with pytest.raises(UserError, match=r"measured with .* default, and its .* yarn 4"):
                load(rope_parameters=rope)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_so_are_those_of_families_with_positions_for_each_type_of_layer(family: str) -> None:
    plain = tiny_model(family)
    sink = measure_static_sink(plain, list(random_tokens(3, 5)))
    made = deploy(plain, MIXED, WINDOW, sink).config
    config: Any = copy.deepcopy(made)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    full = config.rope_parameters["full_attention"] | yarn
    config.rope_parameters = {**config.rope_parameters, "full_attention": full}
    model_class = family_of(config).model_class
    with pytest.raises(UserError, match=r"full_attention default, and its .* yarn 4"):
        model_class(config)
    # Of earlier versions, which did not look there, nobody knows.
    config.bosch = config.bosch | {"sink_rope": "default"}
    model_class(config)
    model_class(made)


@pytest.mark.parametrize("count", [1, 3])
def test_a_sink_that_is_no_number_shows(count: int) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    beyond_BT = torch.arange(40)[None] - WINDOW
    module = SimpleNamespace(window_sink=Sink("tokens", count))
    sink = keys_beyond(module, beyond_BT, torch.full_like(k, torch.nan), v)
    out = sdpa.attend(AttentionCall(q, k, v, 1.0, WINDOW, sink=sink))
    assert out[:, :, WINDOW:].isnan().all()
    assert out[:, :, :WINDOW].isfinite().all()


def test_weight_decay_leaves_sinks_alone() -> None:
    hybrid = hybrid_with("static").float()
    decayed, others = make_optimizer(hybrid, TrainConfig()).param_groups
    names = {parameter: name for name, parameter in hybrid.named_parameters()}
    assert others["weight_decay"] == 0
    assert {names[p] for p in others["params"] if "sink" in names[p]}
    assert not [names[p] for p in decayed["params"] if "sink" in names[p]]
