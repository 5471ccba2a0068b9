"""The method kvzip against plain loops over layers, heads, tokens and keys, on the text and its
repetition in one sequence: no cache, no chunks of rows, no groups."""
# L layers, G kv heads

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bosch.calibration import Calibration
from bosch.method import Inputs
from bosch.methods import kvzip
from bosch.run.errors import UserError
from tests.attention_matrices import inputs_of, matrices, toy_calibration
from tests.model_factory import FAMILIES, SPECIAL, tiny_model
from tests.sampled import sampled

WINDOW, CHUNK = 12, 17  # tokens; the texts have 40 and 38, so the last part is a short one
PROMPTS = {kvzip.PROMPT + "\n": [3, 7, 5, 9], kvzip.NEXT_PROMPT: [4, 8], "\n": [9]}
TOKENIZER = SimpleNamespace(encode=lambda text, add_special_tokens: PROMPTS[text])


def make_inputs(
    model: PreTrainedModel, folder: Path, calibration: Calibration | None = None, **settings: Any
) -> Inputs:
    settings = {"chunk_tokens": CHUNK} | settings
    # Few scores at once, so that rows of a short text are cut too; else the default.
    elements = 1 if settings["chunk_tokens"] == CHUNK else Inputs.chunk_elements
    texts = calibration or toy_calibration(40, count=2)
    return inputs_of(
        kvzip, model, texts, folder, settings, window_tokens=WINDOW, chunk_elements=elements,
        load_tokenizer=lambda: TOKENIZER,
    )  # fmt: skip


def by_hand(inputs: Inputs) -> Tensor:
    """(L, G), by loops."""
    of_texts = []
    for haystack in inputs.calibration.haystacks:
        text = haystack.ids_T.tolist()
        keys = [
            score
            for start in range(0, len(text), CHUNK)
            for score in scores_of_part(inputs, text, start)
        ]  # [key][layer][group]
        keys_LGT = torch.tensor(keys[inputs.settings.sink_tokens :]).permute(1, 2, 0)
        match inputs.settings.statistic:
            case "max":
                of_texts.append(keys_LGT.amax(-1))
            case "mean":
                of_texts.append(keys_LGT.mean(-1))
            case "quantile":
                rank = math.ceil(inputs.settings.quantile * keys_LGT.shape[-1])
                of_texts.append(keys_LGT.sort(-1).values[..., rank - 1])
    table = torch.stack(of_texts)
    return table.amax(0) if inputs.settings.statistic == "max" else table.mean(0)


def scores_of_part(inputs: Inputs, text: list[int], start: int) -> list[list[list[float]]]:
    """The score of each key from `start` on, [key][layer][group]."""
    settings, model = inputs.settings, inputs.model
    prompt = [4, 8, *text[start - 8 : start], 9] if start else [3, 7, 5, 9]
    stop = min(start + CHUNK, len(text))
    given = prompt + text[start:stop]
    whole = torch.tensor(text + given)
    full = matrices(model, SimpleNamespace(ids_T=whole))  # type: ignore[arg-type]
    weight = weights_by_hand(model, whole, len(text), len(prompt))
    num_layers, num_heads, _, _ = full.q_LHTD.shape
    ratio = num_heads // inputs.num_groups
    scores = [[[0.0] * inputs.num_groups for _ in range(num_layers)] for _ in range(start, stop)]
    for layer in range(num_layers):
        for head in range(num_heads):
            for query in range(len(text), len(whole)):
                sinks = range(min(settings.sink_tokens, start))
                seen = [*sinks, *range(start, stop), *range(len(text), query + 1)]
                products = full.k_LHTD[layer, head, seen] @ full.q_LHTD[layer, head, query]
                attention = (products * full.scaling).softmax(-1).tolist()
                for key, value in zip(seen, attention, strict=True):
                    if not start <= key < stop:
                        continue
                    if settings.beyond_window and query - key < WINDOW:
                        continue
                    if settings.weighted_by == "gradient":
                        value *= weight(layer, head, query, key)
                    row = scores[key - start][layer]
                    row[head // ratio] = max(row[head // ratio], value)
    return scores


def weights_by_hand(model: Any, whole: Tensor, text_tokens: int, prompt_tokens: int) -> Any:
    """|v W_O| of a key times the length of the gradient at a query."""
    seen: list[Any] = []
    hooks = []
    for layer in model.base_model.layers:
        attention = layer.self_attn
        # Phi-3 computes queries, keys and values at once.
        of_values = getattr(attention, "v_proj", None) or attention.qkv_proj
        for module in (of_values, attention.o_proj):
            hooks.append(module.register_forward_hook(lambda *call: seen.append(call[2])))
    logits = model(whole[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    first = text_tokens + prompt_tokens
    loss = -sum(logits[i - 1].log_softmax(-1)[whole[i]] for i in range(first, len(whole)))
    config, size = model.config, model.base_model.layers[0].self_attn.head_dim
    values, outputs = [x[..., -config.num_key_value_heads * size :] for x in seen[::2]], seen[1::2]
    gradients = torch.autograd.grad(loss, outputs)
    ratio = config.num_attention_heads // config.num_key_value_heads

    def weight(layer: int, head: int, query: int, key: int) -> float:
        group = head // ratio
        v = values[layer][0, key, group * size : (group + 1) * size]
        w_o = model.base_model.layers[layer].self_attn.o_proj.weight
        added = w_o[:, head * size : (head + 1) * size] @ v
        return (added.norm() * gradients[layer][0, query].norm()).item()

    return weight


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"statistic": "mean", "sink_tokens": 0},
        {"statistic": "quantile", "quantile": 0.8},
        {"beyond_window": True},
        {"weighted_by": "gradient"},
        {"weighted_by": "gradient", "beyond_window": True, "statistic": "mean"},
    ],
)
def test_scores_are_those_of_plain_loops(settings: dict[str, Any], tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_model("qwen3", num_hidden_layers=2, **heads).double()
    check(make_inputs(model, tmp_path, **settings))


@pytest.mark.parametrize("family", sampled(FAMILIES, slice(2)))
def test_every_family_has_both_forms(family: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": 1}
    if family != "helium":  # whose hidden size is that of all heads
        changes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    if "layer_types" in SPECIAL.get(family, {}):
        changes["layer_types"] = ["full_attention"]
    model = tiny_model(family, **changes)
    texts = toy_calibration(24, count=1)
    for weighted_by in ("nothing", "gradient"):
        folder = tmp_path / weighted_by
        check(make_inputs(model.double(), folder, texts, weighted_by=weighted_by))


def check(inputs: Inputs) -> None:
    scores = kvzip.score_groups(inputs)
    assert scores.larger_is == "global"
    found = torch.tensor(scores.groups, dtype=torch.float64)
    expected = by_hand(inputs).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    modules = inputs.model.modules()
    assert not any(module._forward_hooks or "forward" in vars(module) for module in modules)


def test_a_text_and_its_repetition_fit_into_the_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(kvzip, "say", said.append)
    model = tiny_model("qwen3", num_hidden_layers=1, max_position_embeddings=41).double()
    inputs = make_inputs(model, tmp_path)
    scores = kvzip.score_groups(inputs)
    assert said == ["kvzip repeats the first 15 tokens: 41 positions have to hold both"]
    # 41 positions less the 11 tokens of a later prompt are twice 15.
    short = Calibration([type(h)(h.ids_T[:15], ()) for h in inputs.calibration.haystacks])
    assert scores == kvzip.score_groups(make_inputs(model, tmp_path / "short", short))
    tiny = tiny_model("qwen3", num_hidden_layers=1, max_position_embeddings=16)
    with pytest.raises(UserError, match="16 positions are too few"):
        kvzip.score_groups(make_inputs(tiny, tmp_path / "tiny"))


def test_sinks_as_long_as_a_text_are_refused(tmp_path: Path) -> None:
    inputs = make_inputs(tiny_model("qwen3", num_hidden_layers=1), tmp_path, sink_tokens=38)
    with pytest.raises(UserError, match="sink_tokens 38 leave nothing of a text of 38 tokens"):
        kvzip.score_groups(inputs)


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"quantile": 0.0}, {"chunk_tokens": 0}, {"sink_tokens": -1}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            kvzip.Settings(**wrong)


MEASURE = """
import re, sys, tempfile
from pathlib import Path
from bosch.methods import kvzip
from tests.attention_matrices import toy_calibration
from tests.model_factory import tiny_model
from tests.unit.test_kvzip import make_inputs

def peak():
    # Not getrusage, which starts at the peak of the parent process.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

tokens, weighted_by = int(sys.argv[1]), sys.argv[2]
shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
model = tiny_model("llama", max_position_embeddings=2 * tokens, **shape)
settings = {"chunk_tokens": 2_000, "weighted_by": weighted_by}
with tempfile.TemporaryDirectory() as folder:
    inputs = make_inputs(model, Path(folder), toy_calibration(tokens, count=1), **settings)
    before = peak()
    kvzip.score_groups(inputs)
    print(before // 1024, peak() // 1024)
"""


@pytest.mark.slow  # half a minute of an idle core
@pytest.mark.parametrize("weighted_by", ["nothing", "gradient"])
def test_memory_does_not_grow_with_the_square_of_the_text(weighted_by: str) -> None:
    """pytest -s -m slow -k square prints the MiB that a process has before and at its peak. One
    matrix of attention would have 1,024 MiB at 8,192 tokens and 16 GiB at 32,768."""
    added = []
    for tokens in (8_192, 32_768):
        program = [sys.executable, "-c", MEASURE, str(tokens), weighted_by]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        before, peak = map(int, done.stdout.split())
        print(f"{weighted_by}, {tokens} tokens: {before} MiB before, {peak} at most")
        added.append(peak - before)
    assert added[1] < 5 * max(added[0], 100)
    assert added[1] < 1_500
