"""Each static score against the paper's equations, written out over whole attention matrices. And
their memory, which grows with the text, not with its square."""
# L layers, H query heads, G kv heads, T tokens

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bosch.assets import asset_folder
from bosch.calibration import Calibration, Haystack
from bosch.method import Scores
from bosch.methods import apl, dcam, fisher, proxy, qada, razor, retrieval_head, single_group
from bosch.random_texts import draw_texts
from bosch.run.errors import UserError
from bosch.sink import Sink
from tests.attention_matrices import inputs_of, lag_histogram, lags, matrices, toy_calibration
from tests.model_factory import family_parameters, tiny_model
from tests.sampled import sampled

WINDOW = 32
CHUNK = 50_000  # elements: 512 tokens are cut into several chunks of rows
SHAPES = ("gqa", "mha", "tiny")


def make_model(shape: str, dtype: torch.dtype = torch.float64) -> Any:
    if shape == "tiny":  # trained: attention is sharp, and some of it looks far back
        folder = asset_folder("tiny-qwen3")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="bosch")
        return model.to(dtype).eval()
    heads = {"num_attention_heads": 4, "num_key_value_heads": {"gqa": 2, "mha": 4}[shape]}
    return tiny_model("qwen3", num_hidden_layers=2, **heads).to(dtype)


@pytest.fixture(scope="module", params=sampled(SHAPES, slice(1)))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return toy_calibration()


def check(scores: Scores, expected_LH: Tensor, larger_is: str, relative: float = 1e-6) -> None:
    """Heads as expected, and groups as the means of their heads."""
    assert scores.larger_is == larger_is
    found_LH = torch.tensor(scores.heads, dtype=torch.float64)
    torch.testing.assert_close(found_LH, expected_LH, rtol=relative, atol=0)
    groups_LG = torch.tensor(scores.groups, dtype=torch.float64)
    expected_LG = expected_LH.unflatten(1, (groups_LG.shape[1], -1)).mean(-1)
    torch.testing.assert_close(groups_LG, expected_LG, rtol=relative, atol=0)


def run(method: Any, model: Any, texts: Calibration, folder: Path, **settings: Any) -> Scores:
    return method.score_groups(
        inputs_of(method, model, texts, folder, settings, chunk_elements=CHUNK)
    )


def dcam_by_hand(model: PreTrainedModel, calibration: Calibration) -> Tensor:
    length = calibration.longest
    mass = torch.zeros(())
    for haystack in calibration.haystacks:
        histogram = lag_histogram(matrices(model, haystack).weights_LHTT)
        mass = mass + torch.nn.functional.pad(histogram, (0, length - histogram.shape[-1]))
    share = mass / mass.sum(-1, keepdim=True)
    return share[..., :WINDOW].sum(-1)


def apl_by_hand(model: PreTrainedModel, calibration: Calibration) -> Tensor:
    distances = []
    for haystack in calibration.haystacks:
        weights = matrices(model, haystack).weights_LHTT
        for question in haystack.questions:
            row = question.answer.stop - 1
            distances.append(row - weights[:, :, row].argmax(-1))  # the first of equal peaks
    medians = torch.stack(distances, dim=-1).double().quantile(0.5, dim=-1)
    return 1 - (medians / WINDOW).clamp_max(1)


def retrieval_by_hand(model: PreTrainedModel, calibration: Calibration) -> Tensor:
    hits, tokens = torch.zeros(()), 0
    for haystack in calibration.haystacks:
        peaks = matrices(model, haystack).weights_LHTT.argmax(-1)
        for question in haystack.questions:
            for position in question.answer:
                peak = peaks[:, :, position - 1]
                in_needle = (peak >= question.needle.start) & (peak < question.needle.stop)
                hits = hits + (in_needle & (haystack.ids_T[peak] == haystack.ids_T[position]))
                tokens += 1
    return hits.double() / tokens


def proxy_by_hand(
    model: Any, calibration: Calibration, block: int, share: float, first: int = 0
) -> Tensor:
    """first: tokens that a sink holds."""
    total, num_rows = torch.zeros(()), 0
    for haystack in calibration.haystacks:
        weights = matrices(model, haystack).weights_LHTT
        num_layers, num_heads, length, _ = weights.shape
        needed = torch.zeros(num_layers, num_heads, dtype=torch.float64)
        for row in range(length):
            seen = weights[:, :, row, : row + 1].clone()
            by_sink = seen[..., : max(0, min(first, row - WINDOW + 1))]
            held = by_sink.sum(-1, keepdim=True)
            by_sink.zero_()  # of `seen` too
            blocks = seen.split(block, dim=-1)
            mass = torch.stack([part.sum(-1) for part in blocks], dim=-1)
            order = mass[:, :1].argsort(descending=True, stable=True).expand_as(mass)
            running = mass.gather(-1, order).cumsum(-1)
            wanted = share * (running[..., -1:] + held) - held
            count = (running >= wanted).int().argmax(-1) + 1
            needed += count * (wanted[..., 0] > 0) / len(blocks)
        total, num_rows = total + needed, num_rows + length
    return total / num_rows


def qada_by_hand(model: PreTrainedModel, calibration: Calibration, first: int = 0) -> Tensor:
    """With the covariance of the keys written out, as in the paper. first: tokens of a sink."""
    total, num_rows = torch.zeros(()), 0
    for haystack in calibration.haystacks:
        full = matrices(model, haystack)
        length, scaling = full.q_LHTD.shape[2], full.scaling
        shares = [torch.ones(full.q_LHTD.shape[:2], dtype=torch.float64)] * min(WINDOW, length)
        for t in range(WINDOW, length):
            query = full.q_LHTD[:, :, t, :, None]
            local_keys = full.k_LHTD[:, :, t - WINDOW + 1 : t + 1]
            local = (scaling * local_keys @ query).exp().sum((-1, -2))
            num_far = t - WINDOW + 1 - first
            sinks = full.k_LHTD[:, :, : min(first, t - WINDOW + 1)]
            local = local + (scaling * sinks @ query).exp().sum((-1, -2))
            if num_far <= 0:
                shares.append(torch.ones_like(local))
                continue
            begin = max(first, t - WINDOW - WINDOW // 4 + 1)
            keys = full.k_LHTD[:, :, begin : t - WINDOW + 1]
            mean = keys.mean(2, keepdim=True)
            covariance = (keys - mean).transpose(2, 3) @ (keys - mean) / keys.shape[2]
            exponent = scaling * mean @ query + scaling**2 / 2 * query.mT @ covariance @ query
            rest = num_far * exponent.exp()[..., 0, 0]
            shares.append(local / (local + rest))
        total, num_rows = total + torch.stack(shares).sum(0), num_rows + length
    return total / num_rows


def razor_by_hand(
    model: Any, texts: list[Tensor], blocks: list[int], induction_source: Any, over_model: bool
) -> Tensor:
    echo, induction = [], []
    for ids_T, block in zip(texts, blocks, strict=True):
        weights = matrices(model, Haystack(ids_T, ())).weights_LHTT
        later = range(block, len(ids_T))
        sources = [(m, induction_source(m, block)) for m in later]
        echo.append(torch.stack([weights[:, :, m, m - block] for m in later]).mean(0))
        induction.append(torch.stack([weights[:, :, m, j] for m, j in sources if j >= 0]).mean(0))

    def z(each: list[Tensor]) -> Tensor:
        mean = torch.stack(each).mean(0)
        over = {"dim": (0, 1) if over_model else 1, "keepdim": True}
        return (mean - mean.mean(**over)) / mean.std(correction=0, **over)

    return torch.maximum(z(echo), z(induction))


def fisher_by_hand(
    model: PreTrainedModel, calibration: Calibration, loss_tokens: str, sink_tokens: int = 0
) -> Tensor:
    inside, total = torch.zeros(()), torch.zeros(())
    for haystack in calibration.haystacks:
        length = len(haystack.ids_T)
        answers = [range(q.answer.start - 1, q.answer.stop - 1) for q in haystack.questions]
        spans = answers if loss_tokens == "answer" else [range(length - 1)]
        full = matrices(model, haystack, spans)
        assert full.gradient_LHTT is not None
        saliency = (full.gradient_LHTT * full.weights_LHTT) ** 2
        visible = (lags(length) < WINDOW) | (torch.arange(length) < sink_tokens)
        inside = inside + (saliency * visible).sum((-1, -2))
        total = total + saliency.sum((-1, -2))
    return inside / total


PROXY = partial(proxy_by_hand, block=WINDOW // 8, share=0.95)
FISHER = partial(fisher_by_hand, loss_tokens="answer")
OTHER_PROXY = {"block_tokens": 13, "mass_share": 0.6}


@pytest.mark.parametrize(
    ("method", "settings", "by_hand", "larger_is"),
    [
        (apl, {}, apl_by_hand, "local"),
        (dcam, {}, dcam_by_hand, "local"),
        (retrieval_head, {}, retrieval_by_hand, "global"),
        (proxy, {}, PROXY, "global"),
        (proxy, OTHER_PROXY, partial(proxy_by_hand, block=13, share=0.6), "global"),
        (qada, {}, qada_by_hand, "local"),
        (fisher, {}, FISHER, "local"),
        (fisher, {"loss_tokens": "all"}, partial(fisher_by_hand, loss_tokens="all"), "local"),
    ],
)
def test_scores_are_those_of_the_equations(
    method: Any, settings: Any, by_hand: Any, larger_is: str, model: Any, calibration: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    scores = run(method, model, calibration, tmp_path, **settings)
    check(scores, by_hand(model, calibration), larger_is)


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({"razor_texts": 1}, lambda m, block: m + 1 - block),  # as in the paper
        ({"razor_texts": 3}, lambda m, block: m + 1 - block),
        ({"razor_texts": 1, "induction": "equation"}, lambda m, block: m - 1 - block),
        ({"razor_texts": 1, "population": "layer"}, lambda m, block: m + 1 - block),
    ],
)
def test_razor(model: Any, calibration: Any, tmp_path: Path, settings: Any, source: Any) -> None:
    scores = run(razor, model, calibration, tmp_path, **settings)
    inputs = inputs_of(razor, model, calibration, tmp_path, settings)
    # Texts of 512 tokens. Blocks of 128, or of three lengths: times 2 ** (-2 / 3), 1, 2 ** (2 / 3).
    blocks = [128] if settings["razor_texts"] == 1 else [81, 128, 203]
    texts = draw_texts(razor.tokens_to_draw(inputs), blocks, 512, inputs.seed)
    for ids_T, block in zip(texts, blocks, strict=True):
        assert torch.equal(ids_T, ids_T[:block].repeat(7)[:512])
    over_model = settings.get("population") != "layer"
    # z-scores are differences of near values: relative to their spread, which is 1.
    expected = razor_by_hand(model, texts, blocks, source, over_model)
    heads = torch.tensor(scores.heads, dtype=torch.float64)
    torch.testing.assert_close(heads, expected, rtol=1e-6, atol=1e-9)
    assert scores.larger_is == "global"
    assert scores.drawn  # the probe is random


@pytest.mark.parametrize("family", [*family_parameters(), "float32"])
def test_every_family_shows_its_attention(family: str, tmp_path: Path) -> None:
    """And a model in float32 has the same scores."""
    methods = {dcam: dcam_by_hand, fisher: FISHER}
    if family == "float32":
        model, calibration = make_model("gqa", torch.float32), toy_calibration()
        methods |= {qada: qada_by_hand, proxy: PROXY}
    else:
        model, calibration = tiny_model(family), toy_calibration(96, count=1)
        model = model.double()
    for method, by_hand in methods.items():
        scores = run(method, model, calibration, tmp_path / method.__name__)
        check(scores, by_hand(model, calibration), "global" if method is proxy else "local")


def test_single_group_is_the_drop_of_the_answers(calibration: Calibration, tmp_path: Path) -> None:
    model = make_model("gqa")
    scores = run(single_group, model, calibration, tmp_path)

    def value(**search: Any) -> float:
        total, count = 0.0, 0
        for haystack in calibration.haystacks:
            with torch.no_grad():
                output = model(haystack.ids_T[None], use_cache=False, **search)
            logs = output.logits[0].log_softmax(-1)
            for question in haystack.questions:
                chosen = [float(logs[p - 1, haystack.ids_T[p]]) for p in question.answer]
                total, count = total + sum(chosen) / len(chosen), count + 1
        return total / count

    dense = value()
    for layer, group in ((0, 0), (1, 1)):
        z = [[int((i, g) != (layer, group)) for g in range(2)] for i in range(2)]
        drop = dense - value(bosch_mask=z, bosch_window=WINDOW)
        assert scores.groups[layer][group] == pytest.approx(drop, rel=1e-6)
    assert scores.larger_is == "global"


def test_copies_are_counted_where_the_answer_stands_in_the_text(
    calibration: Calibration, tmp_path: Path
) -> None:
    """Not of what follows a text. Two haystacks have such questions, one of them no other."""
    first, second, *others = calibration.haystacks

    def without(questions: Any) -> Any:
        return tuple(replace(question, needle=range(0)) for question in questions)

    some = (*without(first.questions[:1]), *first.questions[1:])
    mixed = [replace(first, questions=some), replace(second, questions=without(second.questions))]
    asked = [replace(first, questions=first.questions[1:]), *others]
    model = make_model("gqa")
    found, expected = (
        run(retrieval_head, model, Calibration(haystacks), tmp_path / name)
        for name, haystacks in (("all", [*mixed, *others]), ("asked", asked))
    )
    assert found == expected
    none = [replace(each, questions=without(each.questions)) for each in calibration.haystacks]
    with pytest.raises(UserError, match="answers stand in their text"):
        run(retrieval_head, model, Calibration(none), tmp_path / "none")


def test_windows_longer_than_the_text_make_every_head_local(tmp_path: Path) -> None:
    model, calibration = make_model("gqa"), toy_calibration(64, count=1)
    for method in (dcam, qada, fisher):
        inputs = inputs_of(method, model, calibration, tmp_path, window_tokens=64)
        assert [*chain(*method.score_groups(inputs).groups)] == pytest.approx([1.0] * 4)


def test_first_tokens_of_a_sink_count_as_visible(calibration: Calibration, tmp_path: Path) -> None:
    model, first = make_model("gqa"), 3

    def scores_of(method: Any, sink: str, **settings: Any) -> Tensor:
        inputs = inputs_of(method, model, calibration, tmp_path / sink, settings)
        found = method.score_groups(replace(inputs, sink=Sink.parse(sink))).heads
        return torch.tensor(found, dtype=torch.float64)

    mass, rows = torch.zeros(()), 0
    peaks = []
    for haystack in calibration.haystacks:
        full = matrices(model, haystack)
        length = len(haystack.ids_T)
        lag, column = lags(length), torch.arange(length)
        visible = (lag < WINDOW) | (column < first)
        mass, rows = mass + (full.weights_LHTT * visible).sum((-1, -2)), rows + length
        hidden = full.weights_LHTT.masked_fill((lag >= WINDOW) & (column < first), -1)
        for question in haystack.questions:
            row = question.answer.stop - 1
            peaks.append(row - hidden[:, :, row].argmax(-1))
    torch.testing.assert_close(scores_of(dcam, f"tokens={first}"), mass / rows)
    medians = torch.stack(peaks, -1).double().quantile(0.5, dim=-1)
    assert torch.equal(scores_of(apl, f"tokens={first}"), 1 - (medians / WINDOW).clamp_max(1))
    expected = fisher_by_hand(model, calibration, "answer", first)
    torch.testing.assert_close(scores_of(fisher, f"tokens={first}"), expected)
    for method, by_hand in ((qada, qada_by_hand), (proxy, PROXY)):
        expected = by_hand(model, calibration, first=first)
        torch.testing.assert_close(scores_of(method, f"tokens={first}"), expected)
    assert torch.equal(scores_of(dcam, "static"), scores_of(dcam, "tokens=1"))


# --- memory: the peak of a process of its own ---


# Peak memory after texts of 512 tokens (everything warm), 2,048 and 8,192.
CHILD = """
import json, re, sys, tempfile
from pathlib import Path
from bosch.plugins import load_plugin
from tests.attention_matrices import inputs_of, toy_calibration
from tests.model_factory import tiny_model

method = load_plugin("bosch.methods", sys.argv[1])
model = tiny_model("qwen3", num_hidden_layers=1, max_position_embeddings=32768)
peaks = []
for length in (512, 2048, 8192):
    with tempfile.TemporaryDirectory() as folder:
        calibration = toy_calibration(length, count=1)
        method.score_groups(
            inputs_of(method, model, calibration, Path(folder), chunk_elements=1 << 20)
        )
    # Not getrusage, which starts at the peak of the parent process.
    status = Path("/proc/self/status").read_text()
    peaks.append(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]))
print(json.dumps(peaks))
"""

# Freed memory returns to the system at once, by a fixed threshold: what the allocator would keep is
# noise.
RELEASE_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dcam", "apl", "proxy", "qada", "razor", "fisher", "retrieval_head", "kvzip"]
)
def test_memory_grows_with_the_text_and_not_with_its_square(name: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, name],
        cwd=Path(__file__).parents[2],
        env=os.environ | RELEASE_MEMORY,
        capture_output=True,
        text=True,
        check=True,
    )
    start, short, long = json.loads(child.stdout)
    # One float32 matrix for the 8 heads has 2 GB at 8,192 tokens and 128 MB at 2,048. Four times
    # the text may add four times the memory. If that is next to nothing, the allocator's noise
    # decides, so at least 16 MB count.
    assert long - start <= 4 * max(short - start, 2**24)
