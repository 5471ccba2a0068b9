"""Attention of stock models and hybrids: masks, padding, documents, gradients, refusals."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)

from bosch.attention.cache import CACHE
from bosch.hybrid.conversion import deploy
from bosch.run.errors import UserError
from tests.model_factory import MIXED, assert_close, packed_positions, random_tokens, tiny_model

row = pytest.mark.ecosystem
WINDOW = 8
ARGUMENTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "deploy": {},
    "search": {"bosch_mask": MIXED, "bosch_window": WINDOW},
    "gates": {"bosch_gates": torch.full((3, 4), 0.3), "bosch_window": WINDOW},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3")


def model_in(mode: str) -> PreTrainedModel:
    model = tiny_model("qwen3")
    return deploy(model, MIXED, WINDOW) if mode == "deploy" else model


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, z: Any = None, **kwargs: Any) -> Tensor:
    mask = {} if z is None else {"bosch_mask": z, "bosch_window": WINDOW}
    out: Tensor = model(ids, **mask, **kwargs).logits
    return out


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_a_padded_row_is_the_row_alone(model: PreTrainedModel, side: str, backend: str) -> None:
    ids, real = random_tokens(2, 50), slice(21, None) if side == "left" else slice(0, 29)
    attention_mask = torch.ones_like(ids)
    attention_mask[0] = 0
    attention_mask[0, real] = 1
    padded = {
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp_min(0),
    }
    both = logits(model, ids, MIXED, use_cache=False, bosch_backend=backend, **padded)
    assert_close(both[0, real], logits(model, ids[:1, real], MIXED)[0])
    assert_close(both[1], logits(model, ids[1:], MIXED)[0])


def test_a_mask_without_padding_builds_no_matrix(model: PreTrainedModel) -> None:
    """Not even for a chunk after cached tokens, where transformers builds one."""
    ids = random_tokens(2, 60)
    seen: list[Tensor | None] = []
    layer = model.model.layers[0].self_attn
    hook = layer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    cache, pieces = DynamicCache(config=model.config), []
    for piece in ids.split([20, 1, 32, 7], dim=1):
        mask = torch.ones(2, cache.get_seq_length() + piece.shape[1], dtype=torch.long)
        pieces.append(logits(model, piece, MIXED, **{CACHE: cache}, attention_mask=mask))
    whole = logits(model, ids, MIXED, use_cache=False)
    logits(model, ids, MIXED, use_cache=False, position_ids=packed_positions(30, 30))
    hook.remove()
    assert seen == [None] * 6
    assert_close(torch.cat(pieces, dim=1), whole)


def test_packed_documents_are_the_documents_alone(model: PreTrainedModel) -> None:
    ids, lengths = random_tokens(2, 60), (13, 1, 30, 16)
    positions, ends = packed_positions(*lengths), torch.tensor([0, 13, 14, 44, 60])
    alone = torch.cat([logits(model, part, MIXED) for part in ids.split(lengths, dim=1)], dim=1)
    assert_close(logits(model, ids, MIXED, position_ids=positions), alone)
    both = torch.cat([positions, packed_positions(60)])
    alone[1:] = logits(model, ids[1:], MIXED)
    assert_close(logits(model, ids, MIXED, position_ids=both), alone)
    named = {"position_ids": positions, "cu_seq_lens_q": ends, "max_length_q": 30}
    assert_close(logits(model, ids[:1], MIXED, **named), alone[:1])


def test_one_tensor_of_positions_may_serve_other_batches(model: PreTrainedModel) -> None:
    positions, ids = packed_positions(10, 20), random_tokens(1, 30)
    for documents in ((10, 20), (30,), (17, 13)):
        positions.copy_(packed_positions(*documents))  # in place, as into a buffer
        expected = logits(model, ids, MIXED, position_ids=positions.clone())
        assert torch.equal(logits(model, ids, MIXED, position_ids=positions), expected)


def test_packed_and_padded_documents_are_kept_apart(model: PreTrainedModel) -> None:
    """transformers looks for documents only where no attention_mask is given."""
    ids = random_tokens(1, 60)
    positions = torch.cat([packed_positions(20, 30), torch.zeros(1, 10, dtype=torch.long)], dim=1)
    attention_mask = (torch.arange(60) < 50).long()[None]
    padded = logits(model, ids, MIXED, position_ids=positions, attention_mask=attention_mask)
    packed = logits(model, ids[:, :50], MIXED, position_ids=positions[:, :50])
    assert_close(padded[:, :50], packed)


@pytest.mark.parametrize("mode", ["dense", "search", "deploy"])
def test_a_mask_of_the_callers_own_is_followed_whatever_the_positions(mode: str) -> None:
    """Two answers to one beginning, side by side: positions start again, and nothing is packed."""
    model, ids = model_in(mode), random_tokens(1, 20)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    mask[..., 15:, 10:15] = False
    arguments = {"attention_mask": mask, **ARGUMENTS[mode]}
    arguments["position_ids"] = torch.tensor([[*range(15), *range(10, 15)]])
    both = logits(model, ids, **arguments)
    first = logits(model, ids[:, :15], use_cache=False, **ARGUMENTS[mode])
    assert_close(both[:, :15], first)
    if mode == "dense":  # elsewhere the window counts the tokens of the other answer too
        second = logits(model, torch.cat([ids[:, :10], ids[:, 15:]], dim=1), use_cache=False)
        assert_close(both[:, 15:], second[:, 10:])
    seen = ids.clone()
    seen[:, 5] += 1  # every token of the second answer sees it
    assert not torch.equal(logits(model, seen, **arguments)[:, 15:], both[:, 15:])


@pytest.mark.parametrize("mode", ["search", "deploy", "gates"])
def test_a_mask_that_looks_ahead_is_refused_where_there_are_windows(mode: str) -> None:
    ids, mask = random_tokens(1, 20), torch.ones(1, 1, 20, 20, dtype=torch.bool)
    logits(model_in("dense"), ids, attention_mask=mask)  # full attention follows it
    with pytest.raises(UserError, match="attention_mask"):
        logits(model_in(mode), ids, attention_mask=mask, **ARGUMENTS[mode])


def test_packed_documents_do_not_continue_a_cache(model: PreTrainedModel) -> None:
    cache = DynamicCache(config=model.config)
    ids = random_tokens(1, 40)
    logits(model, ids[:, :20], MIXED, **{CACHE: cache})
    packed = {CACHE: cache, "position_ids": packed_positions(10, 10)}
    with pytest.raises(UserError, match=r"20 tokens.*position ids"):
        logits(model, ids[:, 20:], MIXED, **packed)


def loss_gradients(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **kwargs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@row("training: gradient checkpointing", "works", "")
@pytest.mark.parametrize("mode", ["search", "deploy", "gates"])
def test_gradient_checkpointing_changes_no_gradient(mode: str) -> None:
    model, arguments = model_in(mode).train(), dict(ARGUMENTS[mode])
    gates = torch.full((3, 4), 0.3).requires_grad_()
    if mode == "gates":
        arguments["bosch_gates"] = gates
    arguments |= {"ids": random_tokens(1, 60), "position_ids": packed_positions(25, 35)}
    plain = loss_gradients(model, **arguments)
    of_gates, gates.grad = gates.grad, None
    old_name = model.gradient_checkpointing_enable  # before transformers 5.2x
    getattr(model, "activation_checkpointing_enable", old_name)()
    checkpointed = loss_gradients(model, **arguments)
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in plain.items())
    assert mode != "gates" or torch.equal(gates.grad, of_gates)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
def test_a_compiled_training_step_has_the_same_gradients() -> None:
    model, ids = model_in("deploy").train(), random_tokens(1, 60)
    packed = {"position_ids": packed_positions(25, 35)}
    expected = loss_gradients(model, ids, **packed)
    compiled = torch.compile(model, backend="aot_eager")
    got = loss_gradients(compiled, ids, **packed)
    got = {name.removeprefix("_orig_mod."): gradient for name, gradient in got.items()}
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bosch_mask": MIXED}, "bosch_window"),
        ({"bosch_window": 8}, "bosch_mask"),
        ({"bosch_mask": MIXED[:2], "bosch_window": 8}, "bosch_mask has 2 layers.* 3"),
        ({"bosch_mask": [[0.5] * 4] * 3, "bosch_window": 8}, r"bosch_mask\[0\].*0\.5"),
        ({"bosch_mask": MIXED, "bosch_window": 0}, "window is 0"),
        ({"bosch_maks": MIXED}, "bosch_maks"),
        ({"s_aux": torch.zeros(8)}, "s_aux"),
        ({"is_causal": False}, "is_causal=False"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, r"cu_seq_lens_q is \(0, 9\).* 20 tokens"),
        ({"attention_mask": torch.zeros(1, 1, 20, 20)}, r"torch\.float32"),
        ({"bosch_gates": torch.ones(2, 4), "bosch_window": 8}, r"\(2, 4\).*3 layers x 4 KV heads"),
    ],
)
def test_misuse_is_refused(model: PreTrainedModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        logits(model, random_tokens(1, 20), **arguments)


@row(
    "bosch_mask: a model with `sdpa`, flash or flex attention",
    "refused",
    "They would ignore it. **`eager` and kernels of the hub do so without a word**; `bosch.masked` "
    "refuses those too.",
)
@pytest.mark.parametrize("argument", ["bosch_mask", "bosch_gates", "bosch_backend"])
def test_other_attention_refuses_what_it_would_ignore(argument: str) -> None:
    model, ids = tiny_model("qwen3", attention="sdpa"), random_tokens(1, 20)
    with pytest.raises(UserError, match=f"'sdpa' would ignore {argument}.*=\"bosch\""):
        logits(model, ids, **{argument: [[0] * 4] * 3})
    assert torch.isfinite(logits(model, ids, **{argument: None})).all()
    for name in ("flash_attention_2", "flex_attention"):
        attention = AttentionInterface()[name]
        with pytest.raises(UserError, match=f"{name}.*{argument}"):
            attention(model, **{argument: 1})


@row(
    "bosch_mask: `generate(bosch_mask=...)`",
    "refused",
    "By transformers; inside `bosch.masked(model, mask)` every `generate` uses the mask.",
)
def test_generate_takes_no_mask(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"not used by the model.*bosch_mask"):
        model.generate(random_tokens(1, 20), bosch_mask=MIXED, bosch_window=8, max_new_tokens=2)


def test_a_family_that_is_not_known_is_refused() -> None:
    """These would drop the mask, or the positions of packed documents, in silence."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96}
    for model_type in ("stablelm", "opt"):
        config = AutoConfig.for_model(model_type, **sizes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="bosch")
        with pytest.raises(UserError, match=rf"'{model_type}'.*qwen3"):
            logits(model, random_tokens(1, 20), [[0] * 4], use_cache=False)


@row("bosch_mask: a static cache", "refused", "Use a dynamic one, or materialize.")
def test_a_static_cache_is_for_calls_without_a_mask(model: PreTrainedModel) -> None:
    ids = random_tokens(1, 20)
    with pytest.raises(UserError, match=r"bosch_mask.*DynamicCache"):
        logits(model, ids, MIXED, **{CACHE: StaticCache(model.config, max_cache_len=30)})
    cache = StaticCache(model.config, max_cache_len=30)
    pieces = [logits(model, piece, **{CACHE: cache}) for piece in ids.split([15, 5], dim=1)]
    assert_close(torch.cat(pieces, dim=1), logits(model, ids))


@row(
    "attn_implementation: another one for a hybrid",
    "refused",
    "It would compute full attention everywhere; `bosch_backend` chooses the kernel.",
)
def test_a_hybrid_takes_no_mask_and_no_other_attention(caplog: pytest.LogCaptureFixture) -> None:
    model = deploy(tiny_model("qwen3"), MIXED, WINDOW)
    for mode in ("search", "gates"):
        with pytest.raises(UserError, match=r"bosch_mask.*bosch_gates"):
            logits(model, random_tokens(1, 20), **ARGUMENTS[mode])
    caplog.set_level(logging.CRITICAL)
    for other in ("eager", "flash_attention_2", "flex_attention"):
        with pytest.raises(UserError, match=other):
            model.set_attn_implementation(other)
    # Of the model inside, which transformers lets pass, and of the config.
    model.model.set_attn_implementation("eager")
    with pytest.raises(UserError, match="eager"):
        logits(model, random_tokens(1, 20))
    model.config._attn_implementation = "sdpa"
    with pytest.raises(UserError, match="sdpa"):
        logits(model, random_tokens(1, 20))


@row("tensor parallelism (`tp_plan`)", "refused", "")
def test_a_rank_that_holds_some_of_the_groups_is_refused() -> None:
    """What tensor parallelism over two ranks leaves of a model."""
    for z in (MIXED, [[1] * 4] * 3, [[0] * 4] * 3, [[1, 1, 1, 0]] * 3):
        model = deploy(tiny_model("qwen3"), z, WINDOW)
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                linear = getattr(layer.self_attn, name)
                half = linear.weight.chunk(2, dim=1 if name == "o_proj" else 0)[0]
                linear.weight = torch.nn.Parameter(half)
        with pytest.raises(UserError, match=r"4 KV heads.* 2 of them.*tp_plan"):
            logits(model, random_tokens(1, 20))
