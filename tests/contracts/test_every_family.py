"""One quick pass for every family: a hybrid computes what its definition says, by any way.
`python -m tests.family_table` writes what was tested into docs/own-model.md."""
# B batch, H query heads, G kv heads, T tokens, D head size

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask

from bosch.attention.cache import CACHE, allocated_bytes, kv_bytes
from bosch.calibration import Calibration, Haystack, Question
from bosch.config import TrainConfig
from bosch.hybrid.conversion import deploy
from bosch.hybrid.export import mask_record
from bosch.hybrid.models import head_size
from bosch.search.score import Evaluator
from bosch.search.settings import Accelerations
from bosch.training.loss import model_loss
from bosch.training.model_start import start_model
from bosch.training.parallel import start_world
from tests.family_table import BEGIN, END, PAGE, families
from tests.model_factory import (
    FAMILIES,
    MIXED,
    assert_close,
    generate_anew,
    logits,
    random_tokens,
    shaken,
    tiny_model,
    undeploy,
)

WINDOW = 16
SEARCH: dict[str, Any] = {"bosch_mask": MIXED, "bosch_window": WINDOW}

# Models of which some layers have windows of their own, before or behind those of the mask.
OWN_WINDOW = 8
KINDS = {
    "first": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "last": ["full_attention", "sliding_attention", *["full_attention"] * 2, "sliding_attention"],
}
OWN = {
    "cohere2": "first",
    "exaone4": "last",
    "gemma3_text": "first",
    "ministral": "last",
    "olmo3": "first",
    "smollm3": "last",
}
WITH_WINDOWS = " with windows"  # of a case's name

every_family = pytest.mark.parametrize("case", [*FAMILIES, *(name + WITH_WINDOWS for name in OWN)])


def model_of(case: str, attention: str = "bosch") -> Any:
    family = case.removesuffix(WITH_WINDOWS)
    changes: dict[str, Any] = {}
    if case != family:
        changes = {"num_hidden_layers": 5, "layer_types": KINDS[OWN[family]]}
        changes |= {"sliding_window": OWN_WINDOW}
    if changes and family == "smollm3":
        changes |= {"use_sliding_window": True, "no_rope_layers": [1, 0, 1, 1, 0]}
    return tiny_model(family, attention=attention, **changes)


def plain_loop(
    module: Any, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_B1TT: Tensor, scaling: float,
    **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Head by head: softmax over the keys that a query sees by the definition of a hybrid."""
    lags_TT = torch.arange(k_BGTD.shape[2])[:, None] - torch.arange(k_BGTD.shape[2])
    heads, of_group = [], q_BHTD.shape[1] // k_BGTD.shape[1]
    kinds = getattr(module.config, "layer_types", None) or ["full_attention"] * 3
    for head in range(q_BHTD.shape[1]):
        group = head // of_group
        if kinds[module.layer_idx] == "sliding_attention":
            window = OWN_WINDOW
        else:
            row = MIXED[kinds[: module.layer_idx].count("full_attention")]
            window = len(lags_TT) if row[group] else WINDOW
        seen_BTT = (lags_TT >= 0) & (lags_TT < window)
        seen_BTT = seen_BTT if mask_B1TT is None else seen_BTT & mask_B1TT[:, 0]
        scores_BTT = q_BHTD[:, head] @ k_BGTD[:, group].mT * scaling
        heads.append(scores_BTT.masked_fill(~seen_BTT, -1e9).softmax(-1) @ v_BGTD[:, group])
    return torch.stack(heads, 2), None


AttentionInterface.register("plain_loop", plain_loop)
AttentionMaskInterface.register("plain_loop", sdpa_mask)


@every_family
def test_search_and_hybrid_are_the_plain_loop(case: str) -> None:
    plain = shaken(model_of(case, attention="plain_loop"))
    model = model_of(case)
    model.load_state_dict(plain.state_dict())
    ids, attention_mask = random_tokens(2, 50), torch.ones(2, 50, dtype=torch.long)
    attention_mask[0, :9] = 0
    hybrid = deploy(model, MIXED, WINDOW)
    for given in ({}, {"attention_mask": attention_mask}):
        expected = logits(plain, ids, use_cache=False, **given)[:, 9:]
        assert_close(logits(model, ids, use_cache=False, **SEARCH, **given)[:, 9:], expected)
        for use_cache in (False, True):
            assert_close(logits(hybrid, ids, use_cache=use_cache, **given)[:, 9:], expected)
    # That nothing is compared with itself: the windows are no detail.
    dense = logits(model, ids, use_cache=False)[:, 9:]
    assert not torch.allclose(dense, logits(plain, ids, use_cache=False)[:, 9:], atol=1e-2)


@every_family
@torch.no_grad()
def test_caches_give_the_tokens_of_no_cache(case: str) -> None:
    hybrid = deploy(model_of(case), MIXED, WINDOW)
    ids, padding = random_tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    expected = generate_anew(hybrid, ids, 6)
    for cache in ("dynamic", "static"):
        settings = {"do_sample": False, "max_new_tokens": 6, "disable_compile": True}
        given = {"attention_mask": padding, "cache_implementation": cache, **settings}
        assert torch.equal(hybrid.generate(ids, **given), expected), cache
    # Of two texts of 31 tokens in float32, which were read at once but for the last token.
    mask, cache = mask_record(hybrid.config).mask, hybrid(ids, use_cache=True)[CACHE]
    cache = hybrid(ids[:, :1], **{CACHE: cache})[CACHE]
    size = head_size(hybrid.config)
    assert kv_bytes(cache) == 2 * mask.kv_bytes(31, size, bytes_per_value=4)
    assert allocated_bytes(cache) == 2 * mask.allocated_bytes(30, size, bytes_per_value=4)


@every_family
def test_a_saved_hybrid_loads_trains_and_goes_back(case: str, tmp_path: Path) -> None:
    model, ids = shaken(model_of(case)), random_tokens(1, 40)
    hybrid = deploy(model, MIXED, WINDOW)
    hybrid.save_pretrained(tmp_path)
    expected = logits(hybrid, ids)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(hybrid)
    assert_close(logits(loaded, ids), expected, 1e-6)
    # A training reads the files itself, and computes its loss from the head's weight.
    trained = start_model(
        tmp_path, TrainConfig(kernels="torch", precision="fp32"), start_world()
    ).eval()
    loss = model_loss(trained, {"input_ids": ids[:, :-1]}, ids[:, 1:], scale=1.0)
    own = F.cross_entropy(expected[0, :-1], ids[0, 1:], reduction="sum")
    assert_close(loss.detach(), own, 1e-5)
    assert all(
        torch.equal(tensor, model.state_dict()[name])
        for name, tensor in undeploy(loaded).state_dict().items()
    )


@every_family
@torch.inference_mode()
def test_a_search_reads_the_models_own_probabilities(case: str) -> None:
    model, ids = shaken(model_of(case)), random_tokens(1, 41)[0]
    questions = tuple(Question(range(n, n + 1), range(1), "toy") for n in (20, 40))
    evaluator = Evaluator(model, Calibration([Haystack(ids, questions)]), WINDOW)
    found = evaluator.hidden_states(evaluator.haystacks[0], MIXED, Accelerations(prefixes=False))
    own = logits(model, ids[None, :40], use_cache=False, **SEARCH)[0, [19, 39]].log_softmax(-1)
    assert_close(evaluator.layers.log_probabilities(found), own)


def test_the_table_in_the_docs_has_every_family() -> None:
    text = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line.split(" | ") for line in text.splitlines()[2:]]
    names = {row[0].removeprefix("| ") for row in rows}
    assert names == {*families(), *(name + WITH_WINDOWS for name in OWN)}
    assert {cell.strip(" |") for row in rows for cell in row[2:]} == {"passed"}
