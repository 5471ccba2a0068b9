"""Generating in batches, with beams and stop strings, compiled, on from a cache, and by
recipes/generate_text.py. Other ways: tests/contracts/test_memory_saved.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, pipeline

from bosch.assets import asset_folder
from bosch.attention.cache import CACHE
from bosch.hybrid.conversion import deploy
from bosch.hybrid.materialize import materialize
from bosch.recipes import generate_text
from tests.hybrid_folders import plain_folder, record_for
from tests.model_factory import MIXED, family_parameters, generate_anew, random_tokens, tiny_model

row = pytest.mark.ecosystem
WINDOW = 16
NEW_TOKENS = 12
PROMPT = "The sky is blue, the grass is green, and the window has sixteen tokens."


def hybrid(family: str = "qwen3") -> Any:
    model = deploy(tiny_model(family), MIXED, WINDOW)
    model.generation_config.pad_token_id = 0
    return model


def generate(model: Any, ids: Tensor, **kwargs: Any) -> Any:
    defaults = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS}
    return model.generate(ids, **(defaults | {"do_sample": False} | kwargs))


def test_generating_goes_on_from_a_cache() -> None:
    model, ids = hybrid(), random_tokens(1, 50)
    first = generate(model, ids, max_new_tokens=5, return_dict_in_generate=True)
    rest = {CACHE: first[CACHE], "max_new_tokens": NEW_TOKENS - 5}
    found = generate(model, first.sequences, **rest)
    assert torch.equal(found, generate_anew(model, ids, NEW_TOKENS))


@row("generate: left-padded batches", "works", "Also in chunks and with a static cache.")
@pytest.mark.parametrize("how", [{}, {"prefill_chunk_size": 7}, {"cache_implementation": "static"}])
def test_left_padded_batches_give_the_tokens_of_each_row_alone(how: dict[str, Any]) -> None:
    model, ids = hybrid(), random_tokens(3, 40)
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :11] = attention_mask[1, :39] = 0
    out = generate(model, ids, attention_mask=attention_mask, disable_compile=True, **how)
    for number, num_padding in enumerate((11, 39, 0)):
        alone = generate_anew(model, ids[number : number + 1, num_padding:], NEW_TOKENS)
        assert torch.equal(out[number, num_padding:], alone[0])


@row("generate: beams, samples", "works", "")
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


@row("generate, pipeline: stop strings", "works", "")
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


@row("generate: `torch.compile`", "works", "With a static cache.")
@pytest.mark.slow
@pytest.mark.parametrize("family", family_parameters())
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
    assert torch.equal(out, generate_anew(model, ids, NEW_TOKENS))
    assert 1 <= len(graphs) <= 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    dense = plain_folder(root / "dense")
    materialize(dense, record_for(dense), root / "hybrid")
    return {"dense": dense, "hybrid": root / "hybrid"}


def expected_text(folder: Path, seed: int | None = None) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    drawn = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    if seed is not None:
        torch.manual_seed(seed)
    sampling = {"do_sample": False} if seed is None else drawn
    out = model.generate(ids, max_new_tokens=NEW_TOKENS, use_cache=True, **sampling)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def run(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    options = ["--model", str(folder), "--prompt", PROMPT, "--max-tokens", str(NEW_TOKENS)]
    generate_text.main([*options, *arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("arguments", [(), ("--prefill-chunk", "7")])
def test_text_and_cache_are_its_own(kind: str, arguments: Any, folders: Any, capsys: Any) -> None:
    said = run(capsys, folders[kind], *arguments)
    assert said.startswith(expected_text(folders[kind]))
    assert f"prompt: {len(PROMPT)} tokens in" in said
    assert f"answer: {NEW_TOKENS} tokens, " in said
    held = len(PROMPT) + NEW_TOKENS - 1  # the last token was never read
    in_use = {"dense": 12 * held, "hybrid": 5 * held + 7 * 15}[kind]
    # Room for 16 tokens more, made at the end of the prompt's 71, or of the tenth chunk of 7 (the
    # room made at 49 was used up). transformers' own cache of the dense model has none.
    full = 70 + 16 if arguments else 71 + 16
    allocated = {"dense": 12 * held, "hybrid": 5 * full + 7 * (15 + 16)}[kind]
    size = 2 * 16 * 4  # keys and values of 16 numbers of 4 bytes
    sizes = f"{allocated * size:,} bytes allocated, {in_use * size:,} in use"
    assert f"KV cache at {held} tokens: {sizes}" in said
    assert ("with full attention everywhere" in said) == (kind == "hybrid")


def test_a_penalty_of_the_models_folder_is_not_used(tmp_path: Path, capsys: Any) -> None:
    """It is a chat's. The most likely token is what the help says, and what evaluations write."""
    folder = plain_folder(tmp_path / "dense")
    expected = expected_text(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"repetition_penalty": 5.0}))
    assert expected_text(folder) != expected
    assert run(capsys, folder).startswith(expected)


def test_the_seed_decides(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ("--temperature", "0.8", "--top-k", "20", "--top-p", "0.9", "--seed")
    said = [run(capsys, folders["hybrid"], *sampling, seed) for seed in ("3", "3", "4")]
    first, again, other = (text.partition("\nprompt: ")[0] for text in said)
    assert other != first == again == expected_text(folders["hybrid"], seed=3)


def test_a_prompts_file_may_be_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = plain_folder(tmp_path / "dense", max_position_embeddings=64)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    options = ["--model", str(dense), "--prompt-file", str(tmp_path / "prompt.txt")]
    generate_text.main([*options, "--max-tokens", "2"])
    captured = capsys.readouterr()
    assert f"prompt: {len(PROMPT)} tokens in" in captured.out
    assert "73 tokens, the model was made for 64:" in captured.err
