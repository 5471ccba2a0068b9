"""vLLM computes what our hybrids compute, and holds the memory that the formula says.

`make serving` runs this where vLLM is installed."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make serving runs this")

import torch
from bosch_vllm import is_served
from bosch_vllm.packing import held_entries, share_of_dense
from transformers import AutoModelForCausalLM

from bosch.hybrid.conversion import deploy, head_size
from bosch.hybrid.export import mask_record
from bosch.hybrid.models import read_sink
from bosch.sink import KEY, NO_SINK, VALUE, Sink, SinkConstants
from tests.contracts.test_every_family import OWN, WITH_WINDOWS, model_of
from tests.model_factory import FAMILIES, MIXED, tiny_model
from tests.serving.hybrids import TINY, WINDOW, tiny_hybrid

PROGRAM = Path(__file__).with_name("engine_program.py")
NEW = 16
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 2, "model": str(TINY)}
OFFLOAD = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
LENGTHS = (3, 63, 64, 65, 129, 500)
CASES = (*FAMILIES, *(name + WITH_WINDOWS for name in OWN))
PACKED = {"additional_config": {"bosch_layout": "packed"}}
LIKE_GPUS = {
    "additional_config": {"bosch_like_gpus": True}
}  # packed, numbers in bf16, small modules
both_layouts = pytest.mark.parametrize("layout", [{}, PACKED], ids=["units", "packed"])


def serve(hybrid: Any, folder: Path, passes: list[dict[str, Any]], **engine: Any) -> dict[str, Any]:
    [answer], log = serve_all([(hybrid, passes)], folder, **engine)
    assert layout_line(engine) in log or not hasattr(hybrid.config, "bosch")
    found: dict[str, Any] = answer
    return found


def serve_all(models: list[tuple[Any, Any]], folder: Path, **engine: Any) -> tuple[list[Any], str]:
    """Several models with their passes, one after another: what each answers, and the log."""
    requests = []
    for number, (model, passes) in enumerate(models):
        model.save_pretrained(folder / str(number))
        requests.append({"folder": str(folder / str(number)), "engine": engine, "passes": passes})
    (folder / "requests.json").write_text(json.dumps(requests))
    command = [sys.executable, PROGRAM, folder / "requests.json", folder / "answers.json"]
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]  # one for each rank
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(cores[:2])} if "tensor" in str(engine) else {}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | bound)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "answers.json").read_text()), done.stdout + done.stderr


def layout_line(engine: dict[str, Any]) -> str:
    """What the log says of the layout."""
    asked = engine.get("additional_config", {})
    if layout := asked.get("bosch_layout"):
        return f"bosch: layout {layout} (as asked), "
    if asked.get("bosch_like_gpus"):
        return "bosch: layout packed (the default on GPUs), "
    return "bosch: layout units (the default on CPUs), "


def refusal(hybrid: Any, folder: Path, **engine: Any) -> str:
    """What an engine that does not start says."""
    with pytest.raises(AssertionError) as caught:
        serve(hybrid, folder, [], **engine)
    return str(caught.value)


def make_prompts(vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(5, vocabulary) for _ in range(length)] for length in lengths]


def our_tokens(model: Any, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    model.generation_config.eos_token_id = None
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 1}
        made = model.generate(ids, max_new_tokens=new, **settings)
        tokens.append(made[0, len(prompt) :].tolist())
    return tokens


@torch.no_grad()
def our_log_probs(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        logits = model(ids, use_cache=False).logits[0].log_softmax(-1)
        found.append(logits[:-1].gather(1, ids[0, 1:, None])[:, 0])
    return found


def furthest(ours: list[torch.Tensor], theirs: list[list[float]]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - torch.tensor(b)).abs().max()) for a, b in pairs)


def assert_agrees(hybrid: Any, folder: Path, **engine: Any) -> list[list[float]]:
    """Tokens, again from cached prefixes, and log-probabilities of the prompts: returns these."""
    return assert_is_ours(hybrid, serve(hybrid, folder, three_passes(hybrid), **engine))


def three_passes(hybrid: Any) -> list[dict[str, Any]]:
    plain = {"prompts": make_prompts(hybrid.config.vocab_size), "new": NEW, "scored": False}
    return [plain, plain, {**plain, "new": 1, "scored": True}]


def assert_is_ours(hybrid: Any, answer: dict[str, Any]) -> list[list[float]]:
    prompts = make_prompts(hybrid.config.vocab_size)
    first, again, scored = answer["passes"]
    tokens = our_tokens(hybrid, prompts)
    assert first["tokens"] == tokens
    assert again["tokens"] == tokens
    if hybrid.config.bosch["window"] > 1:  # a window of one token has nothing to keep
        assert again["cached"] > 500
    assert furthest(our_log_probs(hybrid, prompts), scored["log_probs"]) < 1e-3
    log_probs: list[list[float]] = scored["log_probs"]
    return log_probs


@pytest.mark.parametrize(
    ("ratio", "window", "layout"),
    [
        *((ratio, window, {}) for ratio, window in ((0.25, 64), (0.5, 5), (0.75, 1), (0.875, 64))),
        *((ratio, WINDOW, PACKED) for ratio in (0.25, 0.5, 0.75)),
    ],
)
def test_tokens_are_ours(ratio: float, window: int, layout: dict[str, Any], tmp_path: Path) -> None:
    assert_agrees(tiny_hybrid(ratio, window), tmp_path, **layout)


@pytest.mark.parametrize(
    ("ratio", "window", "layout"),
    [
        *((0.5, WINDOW, {}), (0.75, 1, {}), (0.75, WINDOW, PACKED), (1.0, 5, PACKED)),
        (0.75, WINDOW, LIKE_GPUS),
    ],
)
def test_tokens_with_static_sinks_are_ours(
    ratio: float, window: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    hybrid = tiny_hybrid(ratio, window, has_sinks=True)
    theirs = assert_agrees(hybrid, tmp_path, **layout)
    hybrid.config.bosch["sink"] = {"kind": "none"}
    for module in hybrid.modules():
        for name in (KEY, VALUE):
            if hasattr(module, name):
                delattr(module, name)
    read_sink(hybrid)
    assert furthest(our_log_probs(hybrid, make_prompts(hybrid.config.vocab_size)), theirs) > 1e-2


@both_layouts
def test_whole_layers_agree(layout: dict[str, Any], tmp_path: Path) -> None:
    dense = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    z = [[layer % 2] * 8 for layer in range(8)]
    assert_agrees(deploy(dense, z, WINDOW), tmp_path, **layout)


@pytest.mark.parametrize("layout", [{}, PACKED, LIKE_GPUS], ids=["units", "packed", "like GPUs"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_compiled_it_agrees(has_sinks: bool, layout: dict[str, Any], tmp_path: Path) -> None:
    small = small_hybrid("qwen3", has_sinks)
    assert_agrees(small, tmp_path, enforce_eager=False, **layout)


@pytest.fixture(scope="module")
def every_family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """A hybrid of each case, and what vLLM answers."""
    hybrids = {case: small_hybrid(case, has_sinks=True) for case in CASES}
    models = [(hybrid, three_passes(hybrid)) for hybrid in hybrids.values()]
    answers, _ = serve_all(models, tmp_path_factory.mktemp("families"))
    found = zip(hybrids.values(), answers, strict=True)
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_every_family_agrees(case: str, every_family: dict[str, tuple[Any, Any]]) -> None:
    hybrid, answer = every_family[case]
    if is_served(type(hybrid).__name__):
        assert isinstance(answer, dict), answer
        assert_is_ours(hybrid, answer)
    else:
        assert "no model of its own for" in answer


@pytest.mark.parametrize("layout", ["units", "packed"])
def test_modules_of_few_heads_agree(layout: str, tmp_path: Path) -> None:
    """With 16 query heads a group, windows with sinks have 2 groups on GPUs, and a layer 4."""
    hybrid = small_hybrid("qwen3", has_sinks=True, num_attention_heads=64)
    asked = {"bosch_like_gpus": True, "bosch_layout": layout}
    assert_agrees(hybrid, tmp_path, additional_config=asked)


def small_hybrid(case: str, has_sinks: bool, **changes: Any) -> Any:
    if WITH_WINDOWS in case:
        dense = model_of(case)
    else:
        changes |= {"clip_qkv": None} if case == "olmoe" else {}
        dense = tiny_model(case, num_hidden_layers=3, **changes)
    for module in dense.modules():
        if hasattr(module, "alpha_p"):  # Apertus' activation, which vLLM has in bf16 always
            module.to(torch.bfloat16)
    shape = 3, len(MIXED[0]), head_size(dense.config)
    draws = (torch.Generator().manual_seed(number) for number in (0, 1))
    constants = SinkConstants(*(torch.randn(shape, generator=draw) for draw in draws))
    static = Sink("static", constants=constants)
    return deploy(dense, MIXED, 5, static if has_sinks else NO_SINK)


def test_the_window_is_neither_one_less_nor_one_more(tmp_path: Path) -> None:
    hybrid = tiny_hybrid(0.75)
    theirs = assert_agrees(hybrid, tmp_path)
    prompts = make_prompts(hybrid.config.vocab_size)
    for wrong in (WINDOW - 1, WINDOW + 1):
        hybrid.config.bosch["window"] = wrong
        assert furthest(our_log_probs(hybrid, prompts), theirs) > 1e-2


@both_layouts
def test_26_requests_that_preempt_each_other_get_the_same_tokens(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    hybrid = tiny_hybrid(0.75)
    base, *tails = make_prompts(hybrid.config.vocab_size, (700, *[10, 50, 130, 200] * 5, *[90] * 6))
    prompts = [base[: 500 + 17 * n] + tail for n, tail in enumerate(tails[:10])] + tails[10:]
    assert len(prompts) == 26
    only = {"prompts": prompts, "new": 48, "scored": False}
    limits = {"max_num_seqs": 16, "kv_cache_memory_bytes": 8 << 20, "max_model_len": 1024}
    answer = serve(hybrid, tmp_path, [only], **limits, **layout)
    assert answer["preemptions"] > 0
    assert answer["passes"][0]["cached"] > 0
    assert answer["passes"][0]["tokens"] == our_tokens(hybrid, prompts, 48)


@both_layouts
def test_drafts_of_ngrams_change_no_token(layout: dict[str, Any], tmp_path: Path) -> None:
    hybrid, new = tiny_hybrid(0.75, has_sinks=True), 60
    prompts = [40 * [token, token + 1, token + 2] for token in (20, 700)]
    only = {"prompts": prompts, "new": new, "scored": False}
    (found,) = serve(hybrid, tmp_path, [only], speculative_config=NGRAM, **layout)["passes"]
    assert found["tokens"] == our_tokens(hybrid, prompts, new)
    assert found["steps"] < new  # drafts were accepted


@pytest.mark.parametrize("layout", [{}, PACKED], ids=["units", "packed"])
def test_two_ranks_write_the_same_tokens(layout: dict[str, Any], tmp_path: Path) -> None:
    """In `units` with layers whose full groups two ranks cannot share equally."""
    hybrid = tiny_hybrid(0.75, has_sinks=True)
    if layout:
        dense = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
        counts = (2, 4, 0, 6, 2, 2, 8, 4)
        hybrid = deploy(dense, [[1] * n + [0] * (8 - n) for n in counts], WINDOW)
    prompts = make_prompts(hybrid.config.vocab_size)
    only = {"prompts": prompts, "new": NEW, "scored": False}
    answer = serve(hybrid, tmp_path, [only, only], tensor_parallel_size=2, **layout)
    for found in answer["passes"]:
        assert found["tokens"] == our_tokens(hybrid, prompts)


def test_a_shared_prefix_is_read_once_as_in_the_dense_model(tmp_path: Path) -> None:
    dense = tiny_model("qwen3", head_dim=32)
    prefix, *tails = make_prompts(dense.config.vocab_size, (1_500, 20, 90, 140))
    prompts = [prefix + tail for tail in tails]
    passes = [{"prompts": p, "new": NEW, "scored": False} for p in ([prefix], prompts)]
    saved = {}
    for side, model in (("dense", dense), ("hybrid", deploy(dense, MIXED, WINDOW))):
        (tmp_path / side).mkdir()
        found = serve(model, tmp_path / side, passes)["passes"][1]
        assert found["tokens"] == our_tokens(model, prompts)
        saved[side] = found["cached"]
    print(f"of 3 x 1,500 tokens of a shared prefix these are not read again: {saved}")
    assert saved["hybrid"] == saved["dense"] == 3 * (1_500 // 32 * 32)


def test_a_prefix_within_a_text_is_reused_from_the_second_time_on(tmp_path: Path) -> None:
    """By itself vLLM keeps the windows of a text's end, and of where two texts were seen to part.
    All others have left the window, and what is left of their text is no prefix."""
    hybrid = tiny_hybrid(0.75, has_sinks=True)
    text, *tails = make_prompts(hybrid.config.vocab_size, (1_500, 20, 30, 40))
    prompts = [text, *(text[:700] + tail for tail in tails[:2]), text + tails[2]]
    cached = cached_of_each(hybrid, prompts, tmp_path)
    assert cached == [0, 0, 700 // 32 * 32, 1_500 // 32 * 32]


def test_a_prefix_is_reused_until_its_last_window_is_overwritten(tmp_path: Path) -> None:
    """Asked to keep all windows, vLLM takes blocks that have left the window, and so are free, for
    a prefix until another text has written in them."""
    hybrid = tiny_hybrid(0.75, has_sinks=True)
    text, others, *tails = make_prompts(hybrid.config.vocab_size, (1_500, 1_400, 20, 30, 40))
    prompts = [text, text[:700] + tails[0], others, text + tails[1], text[:400] + tails[2]]
    # Room for both long texts at once, but not for all that they ever write: the others overwrite
    # the windows within the text, and neither the last one nor a full group.
    settings = {"kv_cache_memory_bytes": 34 << 20, "prefix_cache_retention_interval": None}
    cached = cached_of_each(hybrid, prompts, tmp_path, **settings, **PACKED)
    assert cached == [0, 700 // 32 * 32, 0, 1_500 // 32 * 32, 0]


def cached_of_each(hybrid: Any, prompts: list[list[int]], folder: Path, **engine: Any) -> list[int]:
    """Tokens that are not read again, of prompts that come one after another."""
    passes = [{"prompts": [prompt], "new": NEW, "scored": False} for prompt in prompts]
    answers = serve(hybrid, folder, passes, **engine)["passes"]
    assert [each["tokens"] for each in answers] == [our_tokens(hybrid, [p]) for p in prompts]
    return [each["cached"] for each in answers]


@both_layouts
@pytest.mark.parametrize("ratio", [0.5, 0.75])
def test_blocks_held_are_those_of_the_formula(
    ratio: float, layout: dict[str, Any], tmp_path: Path
) -> None:
    """Of texts of 300 and 1,600 tokens, by the engine's own accounting; and more texts fit."""
    hybrid, tokens, new = tiny_hybrid(ratio), 1600, 64
    # The kernels' smallest heads are twice as wide as those of the embedded model.
    entry_bytes = 2 * 32 * 4
    dense_bytes = 64 * tokens * entry_bytes
    lengths = (300 - new, *[tokens - new] * 11)
    short, one, *many = make_prompts(hybrid.config.vocab_size, lengths)
    passes = [{"prompts": p, "new": new, "scored": False} for p in ([short], [one], many)]
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 512, **layout}
    memory = {"kv_cache_memory_bytes": 2 * dense_bytes}  # two texts of the dense model
    answer = serve(hybrid, tmp_path, passes, max_num_seqs=32, **settings, **memory)
    few, alone, together = answer["passes"]
    num_full = sum(hybrid.config.bosch["num_full"])
    mask = mask_record(hybrid.config).mask
    for length, found in ((300, few), (tokens, alone)):
        # The last two tokens are not in the cache when the blocks are counted.
        entries = held_entries(num_full, 64 - num_full, WINDOW, 32, length - 2)
        held = found["held_bytes"] / entry_bytes
        assert entries <= held <= (1.05 if layout else 1) * entries
        # What docs/own-model.md says beside the entries in use.
        in_use = mask.kv_bytes(length - 2, 1, 1) / 2
        assert in_use <= entries <= in_use + 32 * num_full + 64 * (64 - num_full)
    share = share_of_dense(hybrid.config.bosch["num_full"], 8, WINDOW, tokens)
    held, running = alone["held_bytes"] / dense_bytes, together["most_running"]
    print(f"ratio {ratio}: {held:.3f} of dense, formula {share:.3f}; {running} texts where 2 fit")
    assert 0.9 < held / share < 1.1
    assert running >= int(0.8 * 2 / share)


def test_bf16_is_as_near_to_fp32_as_in_our_own_model(tmp_path: Path) -> None:
    """With what GPUs get. An error of attention would be seen beside that of bf16, though in the
    largest differences alone: a window of one token more or less."""
    hybrid = tiny_hybrid(0.75, has_sinks=True)
    prompts = make_prompts(hybrid.config.vocab_size)
    passes = [{"prompts": prompts, "new": 1, "scored": True}]
    answer = serve(hybrid, tmp_path, passes, dtype="bfloat16", **LIKE_GPUS)
    exact = torch.cat(our_log_probs(hybrid, prompts))
    theirs = torch.cat([torch.tensor(each) for each in answer["passes"][0]["log_probs"]])
    errors = {"vLLM in bf16": (theirs - exact).abs()}
    for window in (WINDOW - 1, WINDOW + 1):
        hybrid.config.bosch["window"] = window
        errors[f"a window of {window}"] = (torch.cat(our_log_probs(hybrid, prompts)) - exact).abs()
    hybrid.config.bosch["window"] = WINDOW
    halved = torch.cat(our_log_probs(hybrid.to(torch.bfloat16), prompts)).float()
    errors["ours in bf16"] = (halved - exact).abs()
    for name, error in errors.items():
        print(f"log-probabilities, {name}: off by {error.mean():.4f}, at most {error.max():.3f}")
    found, own = errors["vLLM in bf16"], errors["ours in bf16"]
    assert found.mean() < 1.5 * own.mean()
    assert found.max() < 1.5 * own.max()
    assert all(errors[f"a window of {n}"].max() > 2 * own.max() for n in (WINDOW - 1, WINDOW + 1))


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"tensor_parallel_size": 16}, "16: its 8 groups a layer cannot be shared out"),
        ({"block_size": 20}, "--block-size 20 does not fit CPU_ATTN; leave it out"),
        ({"kv_transfer_config": OFFLOAD}, "a KV connector: vLLM's offload is for GPUs"),
        ({"disable_hybrid_kv_cache_manager": True}, "nothing would be saved"),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size above 1: this has not been run"),
        ({"enable_lora": True}, "LoRA: this has not been run"),
        ({"speculative_config": DRAFTS}, "drafts other than ngram: this has not been run"),
        ({"additional_config": {"bosch_layout": "kinds"}}, "layouts are units and packed"),
        ({"dtype": "float16"}, "static sinks in float16: their shares need the range of bfloat16"),
        ({"hf_overrides": {"architectures": ["Qwen3ForCausalLM"]}}, "fluent, but wrong"),
    ],
)
def test_what_does_not_work_is_refused(engine: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(tiny_hybrid(0.75, has_sinks=True), tmp_path, **engine)


def test_what_vllms_model_leaves_out_is_refused(tmp_path: Path) -> None:
    hybrid = deploy(tiny_model("olmoe", clip_qkv=2.0), MIXED, 5)
    assert "cannot serve a hybrid with clip_qkv" in refusal(hybrid, tmp_path)


def test_a_mask_without_windows_is_refused(tmp_path: Path) -> None:
    assert "no group of this hybrid is on the window" in refusal(tiny_hybrid(0.0), tmp_path)
