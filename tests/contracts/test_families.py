"""What every family must do: equal the stock model with a full mask, and make a right hybrid."""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bosch.calibration import Calibration, Haystack, Question
from bosch.hybrid.conversion import deploy, hybrid_config
from bosch.hybrid.models import family_of
from bosch.plugins import load_plugin
from bosch.run.errors import UserError
from bosch.search.score import Evaluator
from bosch.search.settings import Accelerations
from tests.model_factory import (
    FAMILIES,
    MIXED,
    assert_close,
    families_with,
    family_parameters,
    logits,
    packed_positions,
    random_tokens,
    same_mask,
    shaken,
    tiny_model,
    undeploy,
)

row = pytest.mark.ecosystem
WINDOW = 16
SEARCH: dict[str, Any] = {"bosch_mask": MIXED, "bosch_window": WINDOW}


def native_window(family: str, window_tokens: int) -> dict[str, Any]:
    """The settings with which transformers itself gives every layer a window."""
    of_layers = {"sliding_window": window_tokens, "layer_types": ["sliding_attention"] * 3}
    if family in ("qwen2", "qwen2_moe", "qwen3", "smollm3"):
        return {"use_sliding_window": True, **of_layers}
    if family in ("exaone4", "ministral", "olmo3"):
        return of_layers
    if family == "qwen3_moe":
        return {"use_sliding_window": True, "sliding_window": window_tokens}
    if family in ("mistral", "mixtral", "phi3", "starcoder2"):
        return {"sliding_window": window_tokens}
    return {}  # none, or with other rotary positions in layers of windows


Exact = Callable[[PreTrainedModel], None]
every_family = pytest.mark.parametrize("family", family_parameters())
every_windowed_family = pytest.mark.parametrize(
    "family", [family for family in FAMILIES if native_window(family, 1)]
)


NARROWS_BY_TO = "to(dtype=torch.float" in inspect.getsource(LlamaRotaryEmbedding.forward)


def with_biases(family: str) -> dict[str, Any]:
    """Attention biases, where a family can have them; Qwen2 always has those of q, k and v."""
    fields = load_plugin("bosch.families", family).plain_config_class.__dataclass_fields__
    return {"attention_bias": True} if "attention_bias" in fields else {}


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> Exact:
    """Makes norms compute in the model's own type. Those of transformers round to float32, where a
    norm over all heads gives another result once the heads are permuted."""
    to, single = torch.Tensor.to, torch.Tensor.float

    def stay_exact(x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        narrows = x.dtype == torch.float64 and torch.float32 in (*args, *named.values())
        return x if narrows else to(x, *args, **named)

    def patch(model: PreTrainedModel) -> None:
        def float_or_more(x: torch.Tensor) -> torch.Tensor:
            # Positions are multiplied by frequencies, which `to` leaves exact in transformers 5.17.
            is_position = NARROWS_BY_TO and not x.is_floating_point()
            is_exact = x.dtype == torch.float64 or (is_position and model.dtype == torch.float64)
            return to(x, torch.float64) if is_exact else single(x)

        monkeypatch.setattr(torch.Tensor, "to", stay_exact)
        monkeypatch.setattr(torch.Tensor, "float", float_or_more)

    return patch


@every_family
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_a_full_mask_is_the_stock_model_to_the_bit(family: str, padding: str) -> None:
    ours, stock = (tiny_model(family, attention=name) for name in ("bosch", "sdpa"))
    ids, attention_mask = random_tokens(2, 70), torch.ones(2, 70, dtype=torch.long)
    if padding != "none":
        attention_mask[0, slice(0, 20) if padding == "left" else slice(50, None)] = 0
    arguments = {"attention_mask": attention_mask, "use_cache": False}
    for mask in ({}, {"bosch_mask": same_mask(1, ours), "bosch_window": WINDOW}):
        found = logits(ours, ids, **arguments, **mask)
        assert torch.equal(found, logits(stock, ids, **arguments))


@every_windowed_family
@pytest.mark.parametrize("window_tokens", [1, 16, 64])
def test_an_empty_mask_is_transformers_own_sliding_window(family: str, window_tokens: int) -> None:
    stock = tiny_model(family, attention="sdpa", **native_window(family, window_tokens))
    model = tiny_model(family)
    for length in (7, window_tokens + 1, 130):
        ids = random_tokens(1, length)
        mask = {"bosch_mask": same_mask(0, model), "bosch_window": window_tokens}
        ours = logits(model, ids, use_cache=False, **mask)
        assert_close(ours, logits(stock, ids, use_cache=False))


@every_windowed_family
def test_a_window_of_its_own_in_every_layer_is_refused(family: str) -> None:
    own = native_window(family, 24)
    model, ids = tiny_model(family, **own), random_tokens(1, 50)
    if "layer_types" in own:
        stock = tiny_model(family, attention="sdpa", **own)
        assert_close(logits(model, ids), logits(stock, ids))
        with pytest.raises(UserError, match=r"every layer.*24 tokens"):
            logits(model, ids, **SEARCH)
    else:
        for mask in ({}, SEARCH):
            with pytest.raises(UserError, match=r"24 tokens.*sliding_window=None"):
                logits(model, ids, **mask)
    with pytest.raises(UserError, match="sliding_window=24"):
        deploy(model, MIXED, WINDOW)


@row("training: documents packed by `position_ids`", "works", "")
@pytest.mark.parametrize(
    ("family", "mode", "training"),
    families_with([*product(("search", "deploy", "gates"), (False, True))], step=3),
)
def test_documents_do_not_see_each_other(mode: str, training: bool, family: str) -> None:
    model, ids = tiny_model(family), random_tokens(1, 60)
    gates = {"bosch_gates": torch.full((3, 4), 0.3), "bosch_window": WINDOW}
    arguments = {"search": SEARCH, "gates": gates}.get(mode, {})
    model = (deploy(model, MIXED, WINDOW) if mode == "deploy" else model).train(training)
    changed = ids.clone()
    changed[:, 14:44] = random_tokens(1, 30, seed=7)
    others = torch.tensor([i < 14 or i >= 44 for i in range(60)])
    for cache in ({}, {"use_cache": False}, {"use_cache": True}):
        packed = {"position_ids": packed_positions(13, 1, 30, 16), **cache, **arguments}
        before, after = (logits(model, x, **packed) for x in (ids, changed))
        # Experts see other numbers of tokens: rounding, not a leak.
        tolerance = 1e-4 if family.endswith("moe") or family in ("mixtral", "olmoe") else 0.0
        assert_close(before[:, others], after[:, others], tolerance)
        assert not torch.allclose(before[:, ~others], after[:, ~others])


@every_family
@torch.inference_mode()
def test_the_search_runs_blocks_as_the_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm by norm where the family names its norms, and as a whole where it does not."""
    model, ids = shaken(tiny_model(family)), random_tokens(1, 51)[0]
    rows = [3, 20, 49]

    def hidden_states(answer_rows: bool) -> torch.Tensor:
        evaluator = Evaluator(model, calibration_of(ids, *rows), WINDOW)
        use = Accelerations(prefixes=False, answer_rows=answer_rows)
        return evaluator.hidden_states(evaluator.haystacks[0], MIXED, use)

    by_blocks, by_norms = hidden_states(False), hidden_states(True)
    monkeypatch.delattr(load_plugin("bosch.families", family), "block_norms", raising=False)
    assert torch.equal(hidden_states(True), by_blocks)
    assert_close(by_norms, by_blocks)
    model_states = model.base_model(ids[None, :50], use_cache=False, **SEARCH).last_hidden_state
    assert torch.equal(model.base_model.norm(by_blocks), model_states[:, rows])


def calibration_of(ids: torch.Tensor, *rows: int) -> Calibration:
    """One text, with questions that these rows answer."""
    questions = tuple(Question(range(row + 1, row + 2), range(1), "toy") for row in rows)
    return Calibration([Haystack(ids, questions)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_computes_more_than_its_layers_is_refused(dtype: torch.dtype) -> None:
    model, ids = shaken(tiny_model("qwen3")).to(dtype), random_tokens(1, 50)[0]
    Evaluator(model, calibration_of(ids, 48), WINDOW)

    def add(module: Any, given: Any, output: Any) -> Any:
        output.last_hidden_state = 1.1 * output.last_hidden_state
        return output

    model.base_model.register_forward_hook(add)
    with pytest.raises(UserError, match=r"in sequence: they differ by 9\.\d%"):
        Evaluator(model, calibration_of(ids, 48), WINDOW)


@every_family
def test_the_deployed_hybrid_is_the_searched_one(family: str, exact_norms: Exact) -> None:
    model = shaken(tiny_model(family, **with_biases(family)))
    exact_norms(model)
    ids, attention_mask = random_tokens(2, 90), torch.ones(2, 90, dtype=torch.long)
    attention_mask[0, :31] = 0
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-12)):
        model.to(dtype)
        hybrid = deploy(model, MIXED, WINDOW)
        for kwargs, first in (({}, 0), ({"attention_mask": attention_mask}, 31)):
            searched = logits(model, ids, use_cache=False, **SEARCH, **kwargs)[:, first:]
            for use_cache in (False, True):
                got = logits(hybrid, ids, use_cache=use_cache, **kwargs)[:, first:]
                assert_close(got, searched, tolerance)


@every_family
def test_gradients_of_the_hybrid_are_those_of_the_search(family: str, exact_norms: Exact) -> None:
    model = shaken(tiny_model(family, **with_biases(family))).double()
    exact_norms(model)
    hybrid, ids = deploy(model, MIXED, WINDOW), random_tokens(2, 50)
    model(ids, labels=ids, **SEARCH).loss.backward()
    hybrid(ids, labels=ids).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for parameter in hybrid.parameters():
        parameter.data = parameter.grad
    found = {name: p.detach() for name, p in undeploy(hybrid).named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@row("files: `save_pretrained` and `from_pretrained`", "works", "After `import bosch`.")
@every_family
def test_a_saved_hybrid_loads_with_the_auto_classes(family: str, tmp_path: Path) -> None:
    model, ids = tiny_model(family), random_tokens(1, 90)
    hybrid = deploy(model, MIXED, WINDOW, method="bosch")
    hybrid.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(hybrid)
    assert loaded.config.bosch == hybrid.config.bosch
    assert loaded.config.bosch["method"] == "bosch"
    assert_close(logits(loaded, ids), logits(hybrid, ids))
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == f"bosch_{family}"
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()

    # The window and the rope may change.
    if family in ("cohere2", "phi3"):
        return  # no rope in full layers, and only longrope
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    yarn["original_max_position_embeddings"] = 64
    rope = model.config.rope_parameters
    if "full_attention" in rope:  # one for each type of layer
        yarn = {**rope, "full_attention": {**rope["full_attention"], **yarn}}
    else:
        yarn = {**rope, **yarn}
    stretched = tiny_model(family, rope_parameters=dict(yarn))
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path, rope_parameters=yarn)
    for window_tokens in (WINDOW, 40, 1):
        hybrid.config.bosch["window"] = window_tokens
        searched = logits(stretched, ids, bosch_mask=MIXED, bosch_window=window_tokens)
        assert_close(logits(hybrid, ids), searched, 1e-3)
    plain = logits(model, ids, bosch_mask=MIXED, bosch_window=1)
    assert not torch.allclose(searched, plain, atol=1e-2)


def test_a_hybrid_config_that_does_not_fit_is_refused() -> None:
    config = deploy(tiny_model("qwen3"), MIXED, WINDOW).config
    values = {k: v for k, v in config.to_dict().items() if k != "bosch"}
    for bosch, expected in [
        (config.bosch | {"window": 0}, "window is 0"),
        (config.bosch | {"num_full": [1, 2, 5]}, r"num_full.*\[1, 2, 5\].*3 numbers from 0 to 4"),
        (config.bosch | {"permutation": [[0, 1, 2, 2]] * 3}, "permutation.*4 groups"),
        *(
            (config.bosch | {field: value}, field)
            for field in ("num_full", "permutation")
            for value in (None, 3, [1, None, 2], ["1", "2", "3"])
        ),
        ({"window": 3}, "'num_full'"),
    ]:
        with pytest.raises(UserError, match=expected):
            type(config)(**values, bosch=bosch)
    with pytest.raises(UserError, match=r"config\.bosch"):
        family_of(config).model_class(type(config)())


def test_a_mask_of_another_shape_and_an_unknown_family_are_refused() -> None:
    config = tiny_model("qwen3").config
    with pytest.raises(UserError, match=r"2 layers of \[4\] groups.* 3 of 4"):
        hybrid_config(config, MIXED[:2], WINDOW)
    with pytest.raises(UserError, match=r"'gpt2'.*qwen3"):
        family_of(AutoConfig.for_model("gpt2"))
    with pytest.raises(UserError, match=r"gemma2 cannot.*soft cap"):
        family_of(AutoConfig.for_model("gemma2"))


def printed(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import bosch; from transformers import AutoModelForCausalLM as M",
        "from transformers import AutoModelForCausalLM as M; import bosch",
    ],
)
def test_import_bosch_is_enough_in_any_order(imports: str, tmp_path: Path) -> None:
    deploy(tiny_model("qwen3"), MIXED, WINDOW).save_pretrained(tmp_path)
    code = f"{imports}; print(type(M.from_pretrained({str(tmp_path)!r})).__name__)"
    assert printed(code) == "BoschQwen3ForCausalLM"


@pytest.mark.slow  # a new process, as the two above
def test_a_stock_class_finds_the_attention_after_import_bosch(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    loaded = f"M.from_pretrained({str(tmp_path)!r}, attn_implementation='bosch')"
    code = f"import bosch; from transformers import LlamaForCausalLM as M; print({loaded}.config."
    assert printed(f"{code}_attn_implementation)") == "bosch"
