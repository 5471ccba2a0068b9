"""The commands with --engine vllm and the API server, asked with curl and the openai client, give
what we compute. `make serving` runs this."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make serving runs this")

import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bosch.eval.evaluate import EvaluationPlan, evaluate_folder
from bosch.eval.settings import GenerationSettings, Label, SuiteRun
from bosch.eval.suites import niah
from tests.serving.hybrids import tiny_folder

RECIPES = Path(__file__).parents[2] / "recipes"
PROMPT, NEW = "The city of", 24
PUNKT = ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab")
ARGUMENTS = ["--block-size", "32", "--dtype", "float32", "--enforce-eager"]  # of docs/serving.md


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("served") / "hybrid")


def run(recipe: str, *arguments: object) -> str:
    command = [sys.executable, RECIPES / recipe, *map(str, arguments)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("suite", "changed"), [("niah", ()), ("niah", ("--window", 100, "--yarn", 2)), ("ruler", ())]
)
def test_a_suite_has_the_same_predictions_and_scores(
    suite: str, changed: tuple[object, ...], folder: Path, tmp_path: Path
) -> None:
    asked = ["--suite", suite, "--samples", 6, "--precision", "fp32", *changed]
    if suite == "niah":
        asked += ["--niah-tasks", "niah_single_1", "niah_multikey_1", "--niah-lengths", 256, 512]
        asked += ["--niah-essays", "toy"]
    else:
        words = [f"{chr(97 + n)}{chr(97 + n // 3)}" for n in range(20)]
        draw = random.Random(0)
        lines = (" ".join(draw.choices(words, k=9)).capitalize() for _ in range(1_000))
        (tmp_path / "essays.txt").write_text(".\n".join(lines))
        for name in PUNKT:  # sentences end at every full stop
            (tmp_path / name).touch()
        asked += [
            "--niah-lengths",
            1_024,
            "--niah-essays",
            tmp_path / "essays.txt",
            "--punkt",
            tmp_path,
        ]
    found: list[Any] = []
    for engine in ("vllm", "transformers"):
        out = tmp_path / engine / "evaluation"
        run("evaluate_model.py", "--model", folder, "--out", out, "--engine", engine, *asked)
        scores = json.loads((out / suite / "scores.json").read_text())
        rows = (out / suite / "predictions.jsonl").read_text().splitlines()
        assert len(rows) >= 24
        found.append((rows, scores["rows"]))
    assert found[0] == found[1]
    values = {row["value"] for row in found[0][1]}
    assert suite == "ruler" or 0 < max(values) != min(values)


def test_a_process_of_the_training_has_the_same_predictions_and_scores(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As recover.py evaluates with eval.engine vllm, on the CPU in fp32."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    names = ("niah_single_1", "niah_multikey_1")
    suite = SuiteRun("niah", niah.Settings(lengths=(256, 512), tasks=names, essays="toy"), 6)
    found = []
    for python, engine in ((None, "transformers"), (sys.executable, "vllm")):
        how: Any = {"engine": engine, "python": python}
        plan = EvaluationPlan((suite,), precision="fp32", generation=GenerationSettings(**how))
        out = tmp_path / engine
        evaluate_folder(folder, plan, Label("one", 0, 0), out, tmp_path / "examples")()
        written = (out / "niah" / name for name in ("predictions.jsonl", "scores.json"))
        found.append([path.read_bytes() for path in written])
    assert found[0] == found[1]


# --- the API server ---


@pytest.fixture(scope="module", params=["units", "packed"])
def address(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    place = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "hybrid"]
    place += ["--additional-config", json.dumps({"bosch_layout": request.param})]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with open(folder.parent / "log", "wb") as log:
        server = subprocess.Popen(
            [*program, "--model", folder, *ARGUMENTS, *place],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # it starts a process for the engine
        )
        url = f"http://127.0.0.1:{port}"
        try:
            curl("--retry", "600", "--retry-delay", "1", "--retry-connrefused", f"{url}/health")
            assert f"bosch: layout {request.param}" in (folder.parent / "log").read_text()
            yield url
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def curl(*arguments: str) -> str:
    command = ["curl", "--silent", "--show-error", "--fail", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=NEW, do_sample=False)
    text = tokenizer.decode(made[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
    assert len(text) > NEW
    return str(text)


def test_curl_gets_our_text(address: str, expected: str) -> None:
    asked = {"model": "hybrid", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    header = ("-H", "Content-Type: application/json")
    answer = json.loads(curl(f"{address}/v1/completions", *header, "-d", json.dumps(asked)))
    assert answer["choices"][0]["text"] == expected


def test_the_openai_client_gets_our_text(address: str, expected: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["hybrid"]
    asked = {"model": "hybrid", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    assert client.completions.create(**asked).choices[0].text == expected
    pieces = client.completions.create(**asked, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == expected
