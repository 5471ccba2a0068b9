"""recipes/generate_text.py: the text is the model's own, and what it tells of the cache is true."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bosch.hybrid.materialize import materialize
from bosch.recipes import generate_text
from tests.hybrid_folders import plain_folder, record_for

PROMPT = "The sky is blue, the grass is green, and the window has sixteen tokens."
NEW_TOKENS = 12


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
def test_text_and_cache_are_the_model_s(
    kind: str,
    arguments: tuple[str, ...],
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = run(capsys, folders[kind], *arguments)
    assert said.startswith(expected_text(folders[kind]))
    assert f"prompt: {len(PROMPT)} tokens in" in said
    assert f"answer: {NEW_TOKENS} tokens, " in said
    held = len(PROMPT) + NEW_TOKENS - 1  # the last token was never read
    entries = {"dense": 12 * held, "hybrid": 5 * held + 7 * 15}[kind]
    size = entries * 2 * 16 * 4  # keys and values of 16 numbers of 4 bytes
    assert f"KV cache: {size:,} bytes at {held} tokens" in said
    assert ("with full attention everywhere" in said) == (kind == "hybrid")


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
