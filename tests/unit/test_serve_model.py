"""`bosch serve`: what it starts, and where. That vLLM serves hybrids is tested in tests/serving."""

import os
import sys
from typing import Any

import pytest
import torch

from bosch.model import find_model
from bosch.recipes import serve_model

MODEL = "tiny-qwen3-2layer"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_it_starts_vllm_with_what_this_machine_needs(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(serve_model, "lacking", lambda python, packages: [])
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    layout = ["--additional-config.bosch_layout", "packed"]  # its `_` is vLLM's to read
    serve_model.main(["--model", MODEL, "--dtype", "bfloat16", "--port", "8001", *layout])
    [(python, words, _)] = started
    assert python == sys.executable
    start = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(find_model(MODEL))]
    start += ["--served-model-name", MODEL, "--dtype", "bfloat16", "--port", "8001", *layout]
    own = [] if has_gpu else ["--enforce-eager", "--block-size", "32"]
    assert words == [python, *start, *own]
