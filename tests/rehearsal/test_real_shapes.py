"""The chain at the shapes of real models, with random weights, on the CPU: what the first run on a
GPU would otherwise be the first to do. `make rehearse-cpu`.

Each stage is its recipe in a process of its own. Bounds: no stage makes the logits of a whole
sequence, and none holds the weights once more than it must. The files are in fp32, since most CPUs
compute several times slower in bf16; only the training step is in bf16.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from bosch.assets import asset_folder
from bosch.calibration import Calibration, Haystack, Question, write_calibration
from bosch.masks.mask import num_windowed, read_mask

pytestmark = pytest.mark.rehearsal

SHARED: Any = {"vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
QWEN3_06B = Qwen3Config(
    **(SHARED | {"hidden_size": 1_024, "intermediate_size": 3_072, "num_hidden_layers": 28}),
    num_attention_heads=16,
    num_key_value_heads=8,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
)
# The experts of a layer are 8 of 128, the layers 2 of 48.
QWEN3_30B_A3B = Qwen3MoeConfig(
    **(SHARED | {"hidden_size": 2_048, "intermediate_size": 6_144, "num_hidden_layers": 2}),
    num_attention_heads=32,
    num_key_value_heads=4,
    tie_word_embeddings=False,
    moe_intermediate_size=768,
    num_experts=8,
    num_experts_per_tok=4,
)
LLAMA = LlamaConfig(
    vocab_size=128_256,
    max_position_embeddings=131_072,
    tie_word_embeddings=False,
    hidden_size=2_048,
    intermediate_size=8_192,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
)
RATIO, WINDOW, CONTEXT = 0.75, 48, 256
SEQUENCE = 80  # longer than a chunk of the loss; a backward in bf16 takes minutes on many CPUs
PROMPT, ANSWER = 4_096, 8
LIBRARIES_GB = 1.0  # an idle process, and activations


@dataclass(frozen=True)
class Done:
    """What a stage took."""

    rows: int
    peak_gb: float
    seconds: float


def run(folder: Path, config: Any, recipe: str, *arguments: object) -> Done:
    program = Path(__file__).with_name("stage.py")
    words = [sys.executable, program, config.vocab_size, config.hidden_size, recipe, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = Done(**json.loads(done.stdout.splitlines()[-1]))
    print(f"{config.model_type} {recipe}: {figures}", flush=True)
    return figures


def random_model(folder: Path, config: Any) -> float:
    """The folder `model`, with random weights and the tokenizer of the embedded model, and contexts
    whose answers are this model's own. The weights' GB."""
    torch.manual_seed(0)
    config.initializer_range = 0.1  # so large that attention decides the answers
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(asset_folder().parent / "tiny-qwen3" / name, folder / "model")
    haystacks = []
    for _ in range(2):
        ids_T = torch.randint(config.vocab_size, (CONTEXT,))
        with torch.no_grad():
            ids_T[-1] = model(ids_T[None, :-1], logits_to_keep=1).logits.argmax()
        question = Question(range(CONTEXT - 1, CONTEXT), range(9), "own")
        haystacks.append(Haystack(ids_T, (question,)))
    (folder / "calibration").mkdir()
    write_calibration(folder / "calibration", Calibration(haystacks))
    return sum(p.nbytes for p in model.parameters()) / 1e9


def write_prompt(path: Path, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer((Path(__file__).parents[2] / "README.md").read_text())["input_ids"]
    path.write_text(tokenizer.decode(ids[:PROMPT]))


@pytest.mark.parametrize(
    "config", [QWEN3_06B, QWEN3_30B_A3B, LLAMA], ids=["Qwen3-0.6B", "Qwen3-30B-A3B", "Llama"]
)
def test_the_chain_at_a_real_shape_within_its_memory(config: Any, tmp_path: Path) -> None:
    weights_gb = random_model(tmp_path, config)
    print(f"{config.model_type}: {weights_gb:.1f} GB of weights", flush=True)
    search = ("--method", "bosch", "--ratio", RATIO, "--window", WINDOW, "--model", "model")
    told = run(tmp_path, config, "search_mask", *search, "--calibration", "calibration",
               "--objective", "logprob", "--max-evaluations", 20, "--run-dir", "run")  # fmt: skip
    mask = read_mask(tmp_path / "run" / "mask" / "mask.json").mask
    budget = num_windowed(RATIO, config.num_hidden_layers, config.num_key_value_heads)
    assert mask.num_windowed == budget
    outcomes = (tmp_path / "run" / "mask" / "outcomes.jsonl").read_text()
    assert 2 < outcomes.count('"stage"') <= 20
    # Only the rows of the answers. The weights are mapped from their file, what is held is cached
    # states; a copy of the weights would be more.
    assert told.rows == 1
    assert told.peak_gb < weights_gb

    told = run(tmp_path, config, "materialize_model", "--model", "model",
               "--mask", "run/mask/mask.json", "--out", "hybrid")  # fmt: skip
    assert told.peak_gb < weights_gb

    run(tmp_path, config, "prepare_tokens", "--model", "model", "--source", "toy",
        "--sequence-length", SEQUENCE, "--tokens", SEQUENCE, "--held-out-sequences", 0,
        "--workers", 1, "--out", "tokens")  # fmt: skip
    told = run(tmp_path, config, "train_model", "--model", "hybrid", "--tokens-from", "tokens",
               "--batch-sequences", 1, "--precision", "bf16", "--kernels", "torch",
               "--out", "train")  # fmt: skip
    assert told.rows == 64
    # In fp32: weights, gradients and two moments; in bf16: a copy of the weights and its gradients.
    assert told.peak_gb < (4 + 1) * weights_gb + 2 + LIBRARIES_GB

    (export,) = (tmp_path / "train").glob("step-*")
    write_prompt(tmp_path / "prompt.txt", tmp_path / "model")
    told = run(tmp_path, config, "generate_text", "--model", export, "--prompt-file", "prompt.txt",
               "--max-tokens", ANSWER)  # fmt: skip
    assert told.rows == 1
    assert told.peak_gb < weights_gb + 1 + LIBRARIES_GB
    with safe_open(next(export.glob("*.safetensors")), "pt") as file:
        assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118
