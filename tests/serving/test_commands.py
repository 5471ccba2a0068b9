"""The commands with --engine vllm give what they give without it. `make serving` runs this."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make serving runs this")

from tests.serving.hybrids import tiny_folder

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("served") / "hybrid")


def run(recipe: str, *arguments: object) -> str:
    command = [sys.executable, RECIPES / recipe, *map(str, arguments)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("changed", [(), ("--window", 100, "--yarn", 2)])
def test_niah_has_the_same_predictions_and_scores(
    changed: tuple[object, ...], folder: Path, tmp_path: Path
) -> None:
    asked = ["--niah-tasks", "niah_single_1", "niah_multikey_1", "--lengths", 256, 512]
    asked += ["--essays", "toy", "--limit", 6, "--precision", "fp32", *changed]
    found: list[Any] = []
    for engine in ("vllm", "transformers"):
        out = tmp_path / engine / "evaluation"
        run("evaluate_model.py", "--model", folder, "--out", out, "--engine", engine, *asked)
        scores = json.loads((out / "niah" / "scores.json").read_text())
        rows = (out / "niah" / "predictions.jsonl").read_text().splitlines()
        assert len(rows) == 24
        found.append((rows, scores["rows"]))
    assert found[0] == found[1]
    values = {row["value"] for row in found[0][1]}
    assert 0 < max(values) != min(values)


def test_a_text_is_the_same(folder: Path) -> None:
    asked = ["--model", folder, "--prompt", "The city of", "--max-tokens", 30]
    ours = run("generate_text.py", *asked)
    theirs = run("generate_text.py", *asked, "--engine", "vllm")
    text = ours.partition("\nprompt: ")[0]
    assert len(text) > 40
    assert text in theirs


def test_the_benchmark_compares_both_layouts_with_dense(tmp_path: Path) -> None:
    small = "--lengths 40 --tokens 3 --requests 3 --rounds 1 --window 8".split()
    command = [sys.executable, "-m", "benchmarks", "serving", *small, "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=RECIPES.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = json.loads((tmp_path / "out").read_text())["rows"]
    sides = [f"{new} new, {side}" for new in (1, 3) for side in ("dense", "units", "packed")]
    assert [row["name"] for row in rows] == [f"40 tokens, {side}" for side in sides]
    assert all(row["value"] > 0 for row in rows)
    assert len({row["cache_bytes"] for row in rows}) == 1
